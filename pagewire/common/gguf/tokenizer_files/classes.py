"""The tokenizer classes of transformers that differ from the tokenizer described by tokenizer.json.

Most classes use tokenizer.json as it is. The classes here use only its vocabulary and merges, and build the other parts
themselves. They also have default special tokens, which no file needs to name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagewire.common.gguf.pre_tokenizers import PRE_TOKENIZERS

Parts = dict[str, Any]  # parts of a tokenizer.json; "model" lacks the vocabulary and merges
_SPACE = "▁"  # stands for a space in SentencePiece tokens
_NFC = {"type": "NFC"}
_BYTES: Parts = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_WORDS: list[Parts] = [
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP: Parts = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_END = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class TokenizerClass:
    """A tokenizer class of transformers, and how its tokenizer differs from the tokenizer in tokenizer.json."""

    name: str
    # Returns the parts, given the options in the files and the text of unk_token. None: tokenizer.json is used as it
    # is.
    parts: Callable[[Mapping[str, Any], str | None], Parts] | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)  # default special tokens
    extra: tuple[str, ...] = ()  # names of tokens that are also extra special tokens, if the files list no extra ones
    adds_special: bool = False  # every special token is added a second time, as a special token
    keeps_post_processor: bool = True  # False: nothing is added to prompts
    adds_bos: bool = False  # put bos_token before prompts, whatever tokenizer.json specifies


PLAIN = TokenizerClass("PreTrainedTokenizerFast")


def _has_prefix(options: Mapping[str, Any], *, default: bool = False) -> bool:
    given: bool | None = options.get("add_prefix_space")
    return default if given is None else given


def _bpe(**flags: Any) -> Parts:
    return {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False, **flags}


def _gpt2(options: Mapping[str, Any], _: str | None) -> Parts:
    pre = {**_BYTES, "add_prefix_space": _has_prefix(options)}
    return {"normalizer": None, "pre_tokenizer": pre, "decoder": _BYTES, "model": _bpe()}


def _gpt_neox(options: Mapping[str, Any], _: str | None) -> Parts:
    return {**_gpt2(options, None), "normalizer": _NFC}


def _cohere(options: Mapping[str, Any], _: str | None) -> Parts:
    of_bytes = {**_BYTES, "add_prefix_space": _has_prefix(options)}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "normalizer": _NFC,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, of_bytes]},
        "decoder": of_bytes,
        "model": _bpe(continuing_subword_prefix="", end_of_word_suffix=""),
    }


def _qwen(name: str) -> Callable[[Mapping[str, Any], str | None], Parts]:
    def parts(options: Mapping[str, Any], _: str | None) -> Parts:
        pre = PRE_TOKENIZERS[name].to_json()
        pre["pretokenizers"][-1]["add_prefix_space"] = _has_prefix(options)
        return {"normalizer": _NFC, "pre_tokenizer": pre, "decoder": _BYTES, "model": _bpe()}

    return parts


def _metaspace(scheme: str) -> Parts:
    return {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False}


def _llama(options: Mapping[str, Any], _: str | None) -> Parts:
    has_prefix = _has_prefix(options, default=True)
    scheme = "never" if not has_prefix else "always" if options.get("legacy") else "first"
    return {
        "normalizer": None,
        "pre_tokenizer": _metaspace(scheme),
        "decoder": {"type": "Sequence", "decoders": [*_WORDS, _STRIP] if has_prefix else _WORDS},
        "model": _bpe(fuse_unk=True, byte_fallback=True),
    }


def _code_llama(options: Mapping[str, Any], unk_token: str | None) -> Parts:
    return {
        "normalizer": None,
        "pre_tokenizer": _metaspace("first" if _has_prefix(options, default=True) else "never"),
        "decoder": {"type": "Sequence", "decoders": [*_WORDS, _STRIP]},
        "model": _bpe(fuse_unk=True, byte_fallback=True, unk_token=unk_token),
    }


def _gemma(_: Mapping[str, Any], unk_token: str | None) -> Parts:
    space = {"String": " "}
    return {
        "normalizer": {"type": "Replace", "pattern": space, "content": _SPACE},
        "pre_tokenizer": {"type": "Split", "pattern": space, "behavior": "MergedWithPrevious", "invert": False},
        "decoder": {"type": "Sequence", "decoders": _WORDS},
        "model": _bpe(fuse_unk=True, byte_fallback=True, unk_token=unk_token),
    }


_ENDS = dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END)
_QWENS = dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END)
_MARKS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_FILL_IN = {
    "prefix_token": "▁<PRE>",
    "middle_token": "▁<MID>",
    "suffix_token": "▁<SUF>",
    "eot_token": "▁<EOT>",
    "fill_token": "<FILL_ME>",
}
_GEMMAS = {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")}
_COHERES = {f"{name.lower()}_token": f"<{name}>" for name in ("UNK", "PAD", "CLS", "SEP")}
_COHERES |= {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "mask_token": "<MASK_TOKEN>"}
_CLASSES = (
    TokenizerClass("GPT2Tokenizer", _gpt2, _ENDS),
    TokenizerClass("CodeGenTokenizer", _gpt2, _ENDS),
    TokenizerClass("GPTNeoXTokenizer", _gpt_neox, {**_ENDS, "pad_token": "<|padding|>"}, keeps_post_processor=False),
    TokenizerClass("Qwen2Tokenizer", _qwen("qwen2"), _QWENS, adds_special=True),
    TokenizerClass("Qwen3_5Tokenizer", _qwen("qwen35"), _QWENS),
    TokenizerClass("LlamaTokenizer", _llama, _MARKS),
    TokenizerClass("CodeLlamaTokenizer", _code_llama, {**_MARKS, **_FILL_IN}, extra=tuple(_FILL_IN), adds_bos=True),
    TokenizerClass("GemmaTokenizer", _gemma, _GEMMAS),
    TokenizerClass("CohereTokenizer", _cohere, _COHERES),
)
_BY_NAME = {found.name: found for found in _CLASSES}
# Classes by model type. For the types with PLAIN, the class that the files name is ignored.
_OF_MODEL_TYPE = {
    **dict.fromkeys(("gpt2", "starcoder2", "opt"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "mpt", "olmo", "olmoe"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
    **dict.fromkeys(("mistral", "mistral3", "ministral3", "mixtral", "phi3", "phimoe", "minimax_m2"), PLAIN.name),
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "granite", "granitemoehybrid", "olmo2", "olmo3"), PLAIN.name),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "stablelm"), PLAIN.name),
}
# The model types whose class overrides the class that the files name.
_OVERRULED = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
_BYTE_LEVEL = '"ByteLevel"'
# Classes of transformers that change the tokenizer in ways that are not supported here.
_UNSUPPORTED = """
Albert Bart Barthez Bartpho Bert BertGeneration BertJapanese Bertweet BigBird BioGpt Blenderbot BlenderbotSmall
ByT5 CLIP CTRL Camembert Canine Clvp Cpm CpmAnt DPRContextEncoder DPRQuestionEncoder DPRReader Deberta
DebertaV2 Dia DistilBert Esm Esmc FSMT FastSpeech2Conformer Flaubert Funnel GPTNeoXJapanese GPTSw3 Herbert LED
Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke Lxmert M2M100 MBart MBart50 MLuke MPNet Marian MarkupLM Mgpstr
MobileBert Mvp MyT5 Nllb Nougat OpenAIGPT PLBart Pegasus Perceiver Phobert Pop2Piano ProphetNet Rag Reformer
RemBert RoCBert RoFormer Roberta SeamlessM4T Siglip Siglip2 Speech2Text SpeechT5 Splinter SqueezeBert T5 Tapas
Tipsv2 Udop VideoPrism Vits Wav2Vec2CTC Wav2Vec2PhonemeCTC Whisper XGLM XLM XLMRoberta XLNet
"""


class UnsupportedClassError(ValueError):
    """A tokenizer class of transformers is not supported. The error message names the class and the remedy."""


def class_of(model_type: str, named: str, tokenizer_json: str) -> TokenizerClass:
    """Return the tokenizer class that AutoTokenizer of transformers would choose for a model. `named` is the
    tokenizer_class in tokenizer_config.json, else in config.json, and may be empty. `tokenizer_json` is the text of
    tokenizer.json. Raises UnsupportedClassError if the class is not supported.
    """
    own, said = _OF_MODEL_TYPE.get(model_type, ""), named.removesuffix("Fast")
    own_class = _BY_NAME.get(own, PLAIN)
    if not said:
        return own_class
    # Many files name LlamaTokenizer although their tokens are bytes, as in Llama 3.
    if said == "LlamaTokenizer" and model_type not in _OVERRULED and _BYTE_LEVEL in tokenizer_json:
        return PLAIN
    if own and said != own and (own_class is PLAIN or model_type in _OVERRULED):
        return own_class
    if said.removesuffix("Tokenizer") in _UNSUPPORTED.split():
        raise UnsupportedClassError(
            f"tokenizer_class is {said}, which is not supported; set it to {PLAIN.name} to use tokenizer.json as it is"
        )
    return _BY_NAME.get(said, PLAIN)
