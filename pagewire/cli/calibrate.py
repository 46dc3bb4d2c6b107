"""`pagewire calibrate`: measures with a text which inputs of a model's weights are large, for `--quantization int4`."""

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pagewire import installation
from pagewire.cli.client_flags import count
from pagewire.cli.command import VERBS
from pagewire.client.errors import CommandError
from pagewire.common.gguf import is_gguf
from pagewire.hosting.model_source import ModelSourceError, locate
from pagewire.options import Parser

DEFAULT_TOKENS = 16384
_TOKENIZER_FILE = "tokenizer.json"


def main(arguments: Sequence[str]) -> int:
    """Run the command `pagewire calibrate`, which computes a text with a model's float weights and writes a file for
    the option `--calibrate`. Return 0. Raise CommandError if the text or the model cannot be used."""
    parsed = _parser().parse_args(arguments)
    if missing := installation.shortage(VERBS["calibrate"].extra):
        raise CommandError(f"pagewire calibrate cannot run here: {missing}")
    if parsed.output.is_dir() or not os.access(parsed.output.parent, os.W_OK):
        raise CommandError(f"cannot write {parsed.output}: give the name of a file in an existing folder")
    try:
        text = parsed.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read {parsed.text}: {error}") from None
    from worker_service.server import limit_spinning

    limit_spinning(os.environ)  # before torch is imported
    from pagewire.network.checkpoint_files import CheckpointError
    from scheduler_service.serving.checkpoint.tokenizer import load_tokenizer
    from worker_service.device import is_out_of_memory
    from worker_service.startup.calibration import CHUNK_TOKENS, measure_importance

    try:
        path = Path(locate(parsed.model, parsed.revision).directory)
        tokenizer = load_tokenizer(path if is_gguf(path) else path / _TOKENIZER_FILE)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        token_ids = tokenizer.encode(text).ids
        if len(token_ids) < CHUNK_TOKENS:
            raise CommandError(f"{parsed.text} has {len(token_ids)} tokens: at least {CHUNK_TOKENS} are needed")
        tell = partial(print, file=sys.stderr, flush=True)
        measure_importance(path, token_ids[: parsed.max_tokens], tell).save(parsed.output)
    except (CheckpointError, ModelSourceError, OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise CommandError(f"out of memory: {error}") from error
    print(f"wrote {parsed.output}; serve the model with --quantization int4 --calibrate {parsed.output}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="pagewire calibrate",
        description="Compute a text with a model's float weights, on the CPU, and measure how large each input of its "
        "weights is. With the file that this writes, --quantization int4 rounds more exactly the weights of large "
        "inputs. A text like the model's later use, in its languages, is best.",
    )
    parser.add_argument("model", metavar="MODEL", help="directory, GGUF file or Hugging Face id of a float model")
    parser.add_argument("text", metavar="TEXT", type=Path, help="a UTF-8 text file")
    parser.add_argument("--revision", metavar="NAME", help="revision of a Hugging Face model")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("importance.safetensors"),
        help="the file to write (default: importance.safetensors)",
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=count,
        default=DEFAULT_TOKENS,
        help=f"compute the first N tokens of the text (default: {DEFAULT_TOKENS})",
    )
    return parser
