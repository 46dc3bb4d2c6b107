"""The tokens that ask a model for the text between a prefix and a suffix ("fill in the middle"), and their prompts."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from tokenizers import Tokenizer as HuggingFaceTokenizer

from scheduler_service.serving.checkpoint.model_info import ModelInfo

# The parts of a prompt, in order: texts of a client, which are tokenized one by one, and control tokens.
PromptParts = tuple[str | int, ...]
# By role: the keys of a token in tokenizer_config.json, and else its possible texts. As in llama.cpp, the first text
# that the tokenizer has is used. The texts of one model family are at the same place in the first three lists.
_ROLES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prefix": (
        ("prefix_token", "fim_prefix_token", "fim_prefix"),
        (
            "<|fim_prefix|>",  # Qwen, CodeGemma, newer Granite
            "<fim_prefix>",  # StarCoder2, Granite
            "<fim-prefix>",  # SantaCoder
            "<｜fim▁begin｜>",  # DeepSeek
            "▁<PRE>",  # CodeLlama
            "<|code_prefix|>",  # GLM
            "[PREFIX]",  # Codestral
        ),
    ),
    "suffix": (
        ("suffix_token", "fim_suffix_token", "fim_suffix"),
        (
            "<|fim_suffix|>",
            "<fim_suffix>",
            "<fim-suffix>",
            "<｜fim▁hole｜>",
            "▁<SUF>",
            "<|code_suffix|>",
            "[SUFFIX]",
        ),
    ),
    "middle": (
        ("middle_token", "fim_middle_token", "fim_middle"),
        ("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<｜fim▁end｜>", "▁<MID>", "<|code_middle|>", "[MIDDLE]"),
    ),
    "repository": (
        ("fim_rep_token", "repo_name_token"),
        ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<repo_name>", "<reponame>"),
    ),
    "file": (("fim_sep_token", "file_sep_token"), ("<|file_sep|>", "<file_sep>")),
    "padding": (("fim_pad_token",), ("<|fim_pad|>", "<fim-pad>", "<fim_pad>")),
    "end": (("eot_token",), ("▁<EOT>", "<EOT>")),
    "separator": ((), ("<|file_separator|>",)),  # CodeGemma
    "text_end": ((), ("<|endoftext|>",)),
}
_CONTROLS = ("prefix", "suffix", "middle", "repository", "file")
_ENDS = ("repository", "file", "padding", "end", "separator", "text_end")
_SUFFIX_FIRST = "[PREFIX]"  # prompts with this token have the suffix first, and no token for the middle
# A setting of a tokenizer.json for the space in front of a text. A token's text cannot match: its quotation marks are
# escaped.
_SCHEME = re.compile(r'"prepend_scheme":"(?:first|always)"')
# The text in front of another file if the tokenizer has no token for this, and names of unnamed things. The texts are
# the same as in llama-server.
_SNIPPET, _REPOSITORY_NAME, _FILE_NAME = "\n\n--- snippet ---\n\n", "myproject\n", "filename\n"


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """A tokenizer's tokens for infilling, and the properties of its prompts."""

    inner: HuggingFaceTokenizer  # for the texts in a prompt; puts no space in front of a text
    starts: tuple[int, ...]  # tokens that begin a prompt, such as BOS
    lead: str  # precedes the prefix: a space if the tokenizer puts a space in front of a prompt
    prefix: int
    suffix: int
    middle: int | None  # None: the suffix comes first, and the prompt ends with the prefix
    repository: int | None  # precedes the name of a repository
    file: int | None  # precedes a file with its name
    ends: tuple[int, ...]  # end an infilled text, in addition to the model's end tokens
    spelled: Mapping[int, tuple[int, ...]]  # by control token: ordinary tokens of the same text

    def prompt(self, prefix: str, suffix: str, extra: Sequence[tuple[str, str]] = ()) -> PromptParts:
        """Return the parts of a prompt that asks for the text between `prefix` and `suffix`, without the tokens in
        `starts`. `extra` contains the names and texts of other files, which come first."""
        before, after = (self.prefix, self.lead + prefix), (self.suffix, suffix)
        last = (*after, *before) if self.middle is None else (*before, *after, self.middle)
        return (*(self._files(extra) if extra else ()), *last)

    def without_controls(self, token_ids: list[int]) -> list[int]:
        """Return the tokens of a client's text. Ordinary tokens replace each control token in `spelled`."""
        if self.spelled.keys().isdisjoint(token_ids):
            return token_ids
        return [token_id for given in token_ids for token_id in self.spelled.get(given, (given,))]

    def _files(self, extra: Sequence[tuple[str, str]]) -> Iterator[str | int]:
        if self.repository is not None:
            yield from (self.repository, _REPOSITORY_NAME)
        for name, text in extra:
            yield from (_SNIPPET, text) if self.file is None else (self.file, f"{name}\n", text)
        if self.file is not None:
            yield from (self.file, _FILE_NAME)


def find_infill_tokens(tokenizer: HuggingFaceTokenizer, model: ModelInfo) -> InfillTokens | None:
    """Find a tokenizer's tokens for infilling: by the special tokens that the model's files name, and else by their
    texts. Tokens outside of the model's vocabulary do not count. Return None if the tokenizer has no such tokens."""
    named, vocab_size = model.special_tokens, model.vocab_size
    found = {
        role: token_id
        for role, (keys, texts) in _ROLES.items()
        for text in reversed((*(named[key] for key in keys if key in named), *texts))  # the first text prevails
        if (token_id := tokenizer.token_to_id(text)) is not None and token_id < vocab_size
    }
    is_suffix_first = tokenizer.id_to_token(found.get("prefix", vocab_size)) == _SUFFIX_FIRST
    if not {"prefix", "suffix", "prefix" if is_suffix_first else "middle"} <= found.keys():
        return None
    inner, sample = _without_space(tokenizer), tokenizer.encode("a")
    starts = takewhile(lambda each: each[1], zip(sample.ids, sample.special_tokens_mask, strict=True))
    return InfillTokens(
        inner=inner,
        starts=tuple(token_id for token_id, _ in starts),
        lead="" if inner is tokenizer else " ",
        prefix=found["prefix"],
        suffix=found["suffix"],
        middle=None if is_suffix_first else found["middle"],
        repository=found.get("repository"),
        file=found.get("file"),
        ends=tuple(sorted({found[role] for role in _ENDS if role in found})),
        spelled={found[role]: _spelled(inner, found[role]) for role in _CONTROLS if role in found},
    )


def _without_space(tokenizer: HuggingFaceTokenizer) -> HuggingFaceTokenizer:
    """Return a copy of the tokenizer that puts no space in front of a text. Return the tokenizer itself if it puts no
    space there."""
    text = tokenizer.to_str()
    changed = _SCHEME.sub('"prepend_scheme":"never"', text.replace('"prepend":"▁"', '"prepend":""'))
    return tokenizer if changed == text else HuggingFaceTokenizer.from_str(changed)


def _spelled(tokenizer: HuggingFaceTokenizer, token_id: int) -> tuple[int, ...]:
    """Return ordinary tokens that have the same text as a control token. The text is tokenized in two pieces, because a
    piece does not match the control token."""
    text = tokenizer.id_to_token(token_id) or ""
    return tuple(
        found for piece in (text[:1], text[1:]) for found in tokenizer.encode(piece, add_special_tokens=False).ids
    )
