"""The tokens that ask a model for the text between a prefix and a suffix ("fill in the middle"), and their prompts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Encoding
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
# The text in front of another file if the tokenizer has no token for this, and the names that the prompt gives to the
# repository and to the file with the gap. All are the same as in llama-server.
_SNIPPET, _REPOSITORY, _THIS_FILE = "\n\n--- snippet ---\n\n", "myproject\n", ("filename", "")


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """A tokenizer's tokens for infilling, and the properties of its prompts."""

    inner: HuggingFaceTokenizer  # for the texts in a prompt; puts no space in front of a text
    starts: tuple[int, ...]  # tokens that begin a prompt, such as BOS
    lead: str  # precedes the prefix: a space if the tokenizer puts a space in front of a prompt
    controls: Mapping[str, int]  # the tokens in a prompt, by role; without "middle", the suffix precedes the prefix
    spelled: Mapping[int, tuple[int, ...]]  # by control token: ordinary tokens of the same text
    ends: tuple[int, ...]  # end an infilled text, in addition to the model's end tokens

    def prompt(self, prefix: str, suffix: str, extra: Sequence[tuple[str, str]] = ()) -> PromptParts:
        """Return the parts of a prompt that asks for the text between `prefix` and `suffix`, without the tokens in
        `starts`. `extra` contains the names and texts of other files, which come first."""
        repository, file, middle = map(self.controls.get, ("repository", "file", "middle"))
        parts: list[str | int] = [repository, _REPOSITORY] if extra and repository is not None else []
        for name, text in (*extra, _THIS_FILE) if extra and file is not None else extra:
            parts += (_SNIPPET, text) if file is None else (file, f"{name}\n", text)
        before, after = (self.controls["prefix"], self.lead + prefix), (self.controls["suffix"], suffix)
        return (*parts, *after, *before) if middle is None else (*parts, *before, *after, middle)

    def join(self, parts: Sequence[Encoding | int]) -> list[int]:
        """Return the token ids of a prompt, given its tokenized parts. In texts of a client, ordinary tokens replace
        each control token in `spelled`."""
        return [
            token_id
            for part in parts
            for given in ((part,) if isinstance(part, int) else part.ids)
            for token_id in ((given,) if isinstance(part, int) else self.spelled.get(given, (given,)))
        ]


def find_infill_tokens(tokenizer: HuggingFaceTokenizer, model: ModelInfo) -> InfillTokens | None:
    """Find a tokenizer's tokens for infilling: by the special tokens that the model's files name, and else by their
    texts. Tokens outside of the model's vocabulary do not count. Return None if the tokenizer has no such tokens."""
    found = {
        role: token_id
        for role, (keys, texts) in _ROLES.items()
        for text in (*reversed(texts), *map(model.special_tokens.get, reversed(keys)))  # the last text prevails
        if text and (token_id := tokenizer.token_to_id(text)) is not None and token_id < model.vocab_size
    }
    is_suffix_first = tokenizer.id_to_token(found.get("prefix", model.vocab_size)) == _SUFFIX_FIRST
    if not found.keys() >= {"prefix", "suffix", "suffix" if is_suffix_first else "middle"}:
        return None
    inner, sample = _without_space(tokenizer), tokenizer.encode("a")
    controls = {
        role: found[role] for role in _CONTROLS if role in found and (role, is_suffix_first) != ("middle", True)
    }
    return InfillTokens(
        inner=inner,
        starts=tuple(sample.ids[: (*sample.special_tokens_mask, 0).index(0)]),
        lead="" if inner is tokenizer else " ",
        controls=controls,
        spelled={token_id: _spelled(inner, token_id) for token_id in controls.values()},
        ends=tuple(sorted({token_id for role, token_id in found.items() if role in _ENDS})),
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
