"""A reader of tool calls between tags, anywhere in content."""

from collections.abc import Callable
from typing import NamedTuple

from pagewire.common.chat.chat_output.call_object import Rest
from pagewire.common.chat.chat_output.parts import Content
from pagewire.common.chat.chat_output.unread import Reading, Unread


class CallTags(NamedTuple):
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    is_ended: bool  # output that ends in the middle of an end tag is complete without the tag
    may_lack: bool = False  # an output may begin with a call whose begin tag is missing

    def read(self, unread: Unread, read_call: Callable[[str], Reading[Rest]]) -> Reading[None]:
        """Parse the rest of a model's output, in which tags mark the tool calls. Yield the text outside of the calls as
        content. After each begin tag, run `read_call` with this tag: it parses one call and yields its parts. An end
        tag may be missing.
        """
        if self.may_lack and not (yield from unread.ahead(*self.begins)):
            unread.keep()
            marker = self.begins[0]
        else:
            marker = yield from unread.until(self.begins, Content)
        while marker:
            rest = yield from read_call(marker)
            if rest is None:
                yield Content(unread.kept())
                marker = yield from unread.until(self.begins, Content)
                continue
            marker = yield from unread.begins_with(*self.ends)
            if not marker and self.is_ended and unread.ends_within(*self.ends):
                return
            # Some text may follow a call, such as a surplus brace.
            marker = marker or (yield from unread.until((*self.ends, *self.begins), rest))
            if marker in self.ends:
                yield from unread.skip("\n")
                marker = yield from unread.until(self.begins, Content)
