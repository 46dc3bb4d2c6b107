"""The services on a CUDA device: `pytest -m gpu tests/gpu`. Skipped where there is none."""

import pytest
import torch
import transformers

from tests.system.services import running
from tests.system.test_parity import NUM_OUTPUT_TOKENS, generate_all, random_prompts, reference
from tests.worker.checkpoints import FAMILIES, make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_float32_on_cuda_is_what_transformers_generates(family, tmp_path):
    path = make_checkpoint(tmp_path / "model", family, seed=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = random_prompts(1, 151, (1, 2, 15, 16, 17, 100, 700))
    expected = [reference(model, prompt, NUM_OUTPUT_TOKENS) for prompt in prompts]
    with running(path, worker=["--device", "cuda", "--dtype", "float32"]) as system:
        completions = await generate_all(system.url, prompts, NUM_OUTPUT_TOKENS)
    assert [list(completion.outputs[0].token_ids) for completion in completions] == expected
