"""The worker's configuration: one frozen value, checked once. Importing this loads no torch."""

from dataclasses import dataclass, field
from typing import Any

_ATTENTION_BACKENDS = ("auto", "cpu", "triton", "flash_attn", "torch")
_KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8")
_MEMORY_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def _option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    metadata = {"help": help} | ({"choices": choices} if choices else {})
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Every field is a flag, an environment variable and a YAML key. None: worked out at start."""

    model: str = _option("", "checkpoint directory: config.json, safetensors, tokenizer.json")
    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(50061, "port to listen on; 0 picks a free one")
    device: str = _option("auto", "what computes; auto is cuda where there is one", ("auto", "cpu", "cuda"))
    dtype: str = _option(
        "auto",
        "what to compute in; auto is the checkpoint's own, or float32 on a CPU that does not compute that natively",
        ("auto", "float32", "bfloat16", "float16"),
    )
    load_format: str = _option(
        "auto",
        "where weights come from: auto is the checkpoint; dummy makes random ones, to measure speed with a config.json",
        ("auto", "dummy"),
    )
    block_size: int = _option(16, "token positions in a block of the KV cache")
    num_device_blocks: int | None = _option(None, "usable blocks of the KV cache; by default as many as memory allows")
    num_host_blocks: int = _option(0, "blocks in host memory to swap to; see also --swap-space")
    swap_space: str | None = _option(
        None, "host memory to swap to, such as 2GiB; in place of --num-host-blocks, by default there is none"
    )
    kv_cache_memory: str | None = _option(
        None,
        "memory of the KV cache, such as 4GiB; by default the smaller of 4GiB and 30 % of what is available on a CPU, "
        "and what --gpu-memory-utilization leaves on a GPU",
    )
    kv_cache_dtype: str = _option(
        "auto",
        "what the KV cache holds: numbers as the model computes in them (auto), or less exact ones, which take less "
        "memory and time to read: of 16 bits where a CPU computes in float32; of 8 (fp8: e4m3, scale 1) on a GPU",
        _KV_CACHE_DTYPES,
    )
    gpu_memory_utilization: float = _option(0.9, "part of the GPU's memory to use, weights and KV cache together")
    max_model_len: int | None = _option(None, "positions a sequence may hold; by default the checkpoint's")
    max_num_seqs: int = _option(256, "sequences that run at the same time")
    max_num_batched_tokens: int = _option(2048, "tokens that one step may compute")
    max_graph_batch_size: int = _option(
        256,
        "sequences that decode in one step up to which a GPU replays the step as a CUDA graph; with more it launches "
        "kernel by kernel; 0: always",
    )
    attention_backend: str = _option(
        "auto",
        "what computes attention: C kernels (cpu), Triton kernels (triton), the package flash-attn (flash_attn; needs "
        "--block-size 256) or plain torch; auto is cpu or triton, wherever these can compute the model, and else torch",
        _ATTENTION_BACKENDS,
    )
    tensor_parallel_size: int = _option(1, "ranks that share the model out, each a worker of its own")
    tensor_parallel_rank: int = _option(0, "which of the ranks this is, from 0")
    tensor_parallel_address: str | None = _option(
        None, "HOST:PORT where rank 0 lets the ranks find each other; the same for all of them"
    )
    num_threads: int | None = _option(None, "CPU threads that compute; by default one per core")
    profile: int = _option(
        0,
        "steps to trace with torch's profiler, once, after the first 20; 0 is off. While it writes them the worker is "
        "silent, and with many hundreds of them so long that the scheduler gives it up",
    )
    profile_dir: str = _option(".", "directory for the trace of --profile, a file named by the time")
    tls_cert: str | None = _option(None, "file with the server's certificate chain, PEM; turns TLS on")
    tls_key: str | None = _option(None, "file with the server's private key, PEM")
    tls_client_ca: str | None = _option(None, "file with the CA that clients' certificates must come from, PEM")
    tls_client_names: str | None = _option(
        None,
        "names that clients' certificates may bear, separated by commas; by default --tls-client-ca alone decides",
    )
    otlp_traces_endpoint: str | None = _option(
        None, "collector of traces, http://HOST:PORT for OTLP over gRPC; needs the extra tracing"
    )
    health_host: str = _option("127.0.0.1", "address to listen on at --health-port")
    health_port: int = _option(
        0, "port of a plaintext health service, for probes that know no certificates; 0 is off, --port answers too"
    )

    def validate(self) -> None:
        """Raises ValueError that names the flag, its value and what it may be."""
        if not self.model:
            raise ValueError("--model is empty; give a checkpoint directory")
        _check_range("--port", self.port, 0, 65535)
        _check_range("--health-port", self.health_port, 0, 65535)
        _check_choice("--device", self.device, ("auto", "cpu", "cuda"))
        _check_choice("--dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _check_choice("--load-format", self.load_format, ("auto", "dummy"))
        _check_choice("--kv-cache-dtype", self.kv_cache_dtype, _KV_CACHE_DTYPES)
        _check_choice("--attention-backend", self.attention_backend, _ATTENTION_BACKENDS)
        _check_range("--block-size", self.block_size, 1, 1024)
        _check_range("--max-num-seqs", self.max_num_seqs, 1, 1 << 16)
        _check_range("--max-num-batched-tokens", self.max_num_batched_tokens, 1, 1 << 20)
        _check_range("--max-graph-batch-size", self.max_graph_batch_size, 0, 1 << 16)
        if self.num_device_blocks is not None:
            _check_range("--num-device-blocks", self.num_device_blocks, 1, (1 << 31) - 2)
        if self.max_model_len is not None:
            _check_range("--max-model-len", self.max_model_len, 1, 1 << 24)
        if self.num_threads is not None:
            _check_range("--num-threads", self.num_threads, 1, 1024)
        _check_range("--profile", self.profile, 0, 100_000)
        _check_range("--num-host-blocks", self.num_host_blocks, 0, (1 << 31) - 2)
        if self.swap_space is not None:
            parse_memory("--swap-space", self.swap_space)
            if self.num_host_blocks:
                raise ValueError(
                    f"--swap-space is {self.swap_space} and --num-host-blocks is {self.num_host_blocks}; give only one"
                )
        if self.kv_cache_memory is not None:
            parse_memory("--kv-cache-memory", self.kv_cache_memory)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization}; it must be above 0 and at most 1"
            )
        self._validate_ranks()
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"--otlp-traces-endpoint is {endpoint!r}; it must be http://HOST:PORT or https://HOST:PORT"
            )
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("--tls-cert and --tls-key belong together; give both or neither")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        if self.tls_client_names and not self.tls_client_ca:
            raise ValueError("--tls-client-names needs --tls-client-ca")

    def _validate_ranks(self) -> None:
        size, address = self.tensor_parallel_size, self.tensor_parallel_address
        _check_range("--tensor-parallel-size", size, 1, 1024)
        _check_range("--tensor-parallel-rank", self.tensor_parallel_rank, 0, size - 1)
        if address is None:
            if size > 1:
                raise ValueError(
                    f"--tensor-parallel-size is {size}, but --tensor-parallel-address is missing; give all ranks the "
                    "HOST:PORT where rank 0 shall listen"
                )
            return
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ValueError(f"--tensor-parallel-address is {address!r}; it must be HOST:PORT")


def parse_memory(flag: str, text: str) -> int:
    """Bytes of a text such as "4GiB", "512MiB" or "1000000". Raises ValueError that names the flag."""
    number = text.strip().rstrip("abceghikmtABCEGHIKMT ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        num_bytes = int(float(number) * _MEMORY_UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        num_bytes = 0
    if num_bytes <= 0:
        raise ValueError(f"{flag} is {text!r}; it must be a positive size such as 4GiB, 512MiB or a number of bytes")
    return num_bytes


def _check_range(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{flag} is {value}; it must be {low} to {high}")


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{flag} is {value!r}; it must be one of {', '.join(choices)}")
