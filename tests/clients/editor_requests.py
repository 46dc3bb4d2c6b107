"""The requests of llama.vim, llama-vscode and Continue, with the bodies that their sources build."""

import json
from typing import Any

import httpx2 as httpx

PREFIX, SUFFIX = "def add(a, b):\n    ", "\n\nprint(add(1, 2))\n"
PROMPT = f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>"
TIMES = ("prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second")
TIMES += ("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second")
EXTRA = [{"text": "def sub(a, b):\n    return a - b\n", "time": 12.5, "filename": "sub.py"}]
VIM = {
    **{"id_slot": 0, "input_prefix": "def add(a, b):\n", "input_suffix": SUFFIX, "input_extra": [], "prompt": "    "},
    **{"n_predict": 128, "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.90},
    **{"samplers": ["top_k", "top_p", "infill"], "stream": False, "cache_prompt": True},
    **{"t_max_prompt_ms": 500, "t_max_predict_ms": 60_000},
    "response_fields": ["content", *(f"timings/{name}" for name in TIMES), "truncated", "tokens_cached"],
}
VIM_WARM_UP = {
    **{"id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": EXTRA, "prompt": "", "n_predict": 0},
    **{"temperature": 0.0, "samplers": [], "stream": False, "cache_prompt": True},
    **{"t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""]},
}
CODE = {
    **{"id_slot": 0, "input_prefix": "def add(a, b):\n", "input_suffix": SUFFIX, "input_extra": [], "prompt": "    "},
    **{"n_predict": 128, "n_cmpl": 1, "top_k": 40, "top_p": 0.99, "stream": False},
    **{"samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "n_indent": 4},
    **{"t_max_prompt_ms": 500, "t_max_predict_ms": 60_000},
}
CODE_WARM_UP = {
    **{"id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": EXTRA, "prompt": "", "n_predict": 0},
    **{"samplers": [], "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1},
}
OLLAMA_OPTIONS = {"temperature": 0.01, "num_predict": 256, "stop": ["<|fim_pad|>", "\n\n\n"], "num_ctx": 8192}
# Continue sends a suffix if the model's template has one; otherwise it writes the prompt itself.
FILLS = [
    {"prompt": PREFIX, "suffix": SUFFIX},
    {"prompt": PREFIX, "suffix": SUFFIX, "raw": True},
    {"prompt": PROMPT, "raw": True},
]


async def post(url: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as api:
        response = await api.post(url, json=body)
    assert response.status_code == 200, (url, response.text)
    return response


async def streamed_chat(url: str, body: dict[str, Any]) -> str:
    """Return the text of a streamed answer of OpenAI's API."""
    response = await post(url, body | {"stream": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


async def ollama_fill(base_url: str, model: str, fill: dict[str, Any]) -> str:
    """Return the streamed text of one of Continue's requests for a completion."""
    body = {"model": model, "options": OLLAMA_OPTIONS, "keep_alive": 1800, "stream": True}
    response = await post(f"{base_url}/api/generate", body | fill)
    return "".join(json.loads(line)["response"] for line in response.text.splitlines())
