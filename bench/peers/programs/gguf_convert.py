"""Runs llama.cpp's own converter for a checkpoint whose tokenizer was never published.

python gguf_convert.py LLAMA_CPP_SOURCE CHECKPOINT OUT.gguf
"""

import runpy
import sys

source, checkpoint, out = sys.argv[1:]
sys.path[:0] = [source, f"{source}/gguf-py"]

from conversion import base  # noqa: E402

# The converter recognises published tokenizers by a digest.
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
# Otherwise it requires the layers for multi-token prediction that published checkpoints have.
base.ModelBase.no_mtp = True
sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", out, "--outtype", "bf16"]
runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")
