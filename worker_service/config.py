"""The worker's configuration: one frozen value, checked once. Importing this loads no torch."""

import os
from dataclasses import dataclass, field
from typing import Any

from pagewire.transport.addresses import MAX_SOCKET_PATH_BYTES

# The packages that each needs beside torch. A backend is `worker_service/attention/backends/NAME.py`.
ATTENTION_BACKENDS = {"cpu": "", "triton": "triton", "flash_attn": "flash-attn, and triton,", "torch": ""}
_KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8")
_MEMORY_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def _option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    metadata = {"help": help} | ({"choices": choices} if choices else {})
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Every field is a flag, an environment variable and a YAML key. None: worked out at start."""

    model: str = _option("", "checkpoint directory, or the id of a Hugging Face model, such as Qwen/Qwen3-0.6B")
    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(50061, "port to listen on; 0 picks a free one")
    socket: str | None = _option(
        None,
        "path of a Unix socket to listen on instead of --host and --port, which a scheduler dials by --worker "
        "unix:PATH; whoever may write to it, or to its directory, commands the worker",
    )
    device: str = _option(
        "auto", "where to compute; auto: cuda if there is a GPU, otherwise cpu", ("auto", "cpu", "cuda")
    )
    dtype: str = _option(
        "auto",
        "data type to compute in; auto: the checkpoint's, or float32 on a CPU without fast arithmetic for that",
        ("auto", "float32", "bfloat16", "float16"),
    )
    load_format: str = _option(
        "auto",
        "auto: read the checkpoint's weights; dummy: make random weights, to measure speed with only a config.json",
        ("auto", "dummy"),
    )
    block_size: int = _option(16, "how many tokens a block of the KV cache holds")
    num_device_blocks: int | None = _option(
        None, "number of blocks of the KV cache (default: as many as --kv-cache-memory holds)"
    )
    num_host_blocks: int | None = _option(
        None, "number of blocks in host memory to swap to; an alternative to --swap-space"
    )
    swap_space: str | None = _option(
        None,
        "host memory for swapped KV cache, such as 2GiB; 0 turns swapping off (default: none on a CPU; on a GPU 10 % "
        "of the available memory divided by the ranks of the machine, at most 4GiB)",
    )
    kv_cache_memory: str | None = _option(
        None,
        "memory for the KV cache, such as 4GiB (default: on a CPU 30 % of the available memory, at most 4GiB; on a GPU "
        "whatever --gpu-memory-utilization leaves)",
    )
    kv_cache_dtype: str = _option(
        "auto",
        "data type of the KV cache; auto: the one the model computes in. A smaller one saves memory and bandwidth but "
        "is less exact: 16 bits on a CPU that computes in float32, fp8 (e4m3, scale 1) on a GPU",
        _KV_CACHE_DTYPES,
    )
    gpu_memory_utilization: float = _option(0.9, "share of the GPU's memory to use, for weights and KV cache together")
    max_model_len: int | None = _option(
        None, "longest sequence, prompt and output together, in tokens (default: the checkpoint's limit)"
    )
    max_num_seqs: int = _option(256, "how many sequences can run at the same time")
    max_num_batched_tokens: int = _option(2048, "how many tokens one step can compute")
    max_graph_batch_size: int = _option(
        256,
        "largest decoding batch that a GPU replays as a CUDA graph; larger ones launch each kernel; 0 turns graphs off",
    )
    attention_backend: str = _option(
        "auto",
        "implementation of attention: C kernels (cpu), Triton kernels (triton), the flash-attn package (flash_attn; "
        "needs --block-size 256) or plain torch; auto: cpu or triton if it supports the model, otherwise torch",
        ("auto", *ATTENTION_BACKENDS),
    )
    tensor_parallel_size: int = _option(1, "number of ranks to split the model across; each is a process of its own")
    tensor_parallel_rank: int = _option(0, "which rank this process is, counted from 0")
    tensor_parallel_address: str | None = _option(
        None,
        "HOST:PORT on which rank 0 listens for the other ranks, or file:DIRECTORY of ranks that share a machine; the "
        "same for all ranks. Without it the worker starts all ranks on this machine, on --port and the ports that "
        "follow it",
    )
    num_threads: int | None = _option(None, "number of CPU threads to compute with (default: one per core)")
    profile: int = _option(
        0,
        "number of steps to trace with torch's profiler, once, after the first 20; 0 turns it off. Writing many "
        "hundreds of steps takes so long that the scheduler gives the worker up",
    )
    profile_dir: str = _option(".", "directory for the trace that --profile writes")
    tls_cert: str | None = _option(None, "PEM file with the server's certificate chain; turns TLS on")
    tls_key: str | None = _option(None, "PEM file with the server's private key")
    tls_client_ca: str | None = _option(
        None, "PEM file of the authority that clients' certificates must come from; turns mutual TLS on"
    )
    tls_client_names: str | None = _option(
        None,
        "names of the clients to admit, as in their certificates, separated by commas (default: all that "
        "--tls-client-ca signed)",
    )
    link_secret_file: str | None = _option(
        None,
        "file with the secret that a scheduler must show, which has a file with the same one; read whenever one "
        "connects (default: whoever connects may command the worker, if it has the certificate that is asked for)",
    )
    otlp_traces_endpoint: str | None = _option(
        None, "where to send traces: http://HOST:PORT of a collector, OTLP over gRPC; needs the extra `tracing`"
    )
    health_host: str = _option("127.0.0.1", "address of --health-port")
    health_port: int = _option(
        0, "plaintext port for health probes that cannot use TLS; 0 turns it off (--port answers probes too)"
    )

    def validate(self) -> None:
        """Raises ValueError that names the flag, its value and what it may be."""
        if not self.model:
            raise ValueError("--model is empty; give a checkpoint directory")
        _check_range("--port", self.port, 0, 65535)
        _check_range("--health-port", self.health_port, 0, 65535)
        if self.socket is not None:
            _check_socket("--socket", self.socket)
        _check_choice("--device", self.device, ("auto", "cpu", "cuda"))
        _check_choice("--dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _check_choice("--load-format", self.load_format, ("auto", "dummy"))
        _check_choice("--kv-cache-dtype", self.kv_cache_dtype, _KV_CACHE_DTYPES)
        _check_choice("--attention-backend", self.attention_backend, ("auto", *ATTENTION_BACKENDS))
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
        if self.num_host_blocks is not None:
            _check_range("--num-host-blocks", self.num_host_blocks, 0, (1 << 31) - 2)
        if self.swap_space is not None:
            parse_memory("--swap-space", self.swap_space, least=0)
            if self.num_host_blocks is not None:
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
            if self.tensor_parallel_rank > 0:
                raise ValueError(
                    f"--tensor-parallel-rank is {self.tensor_parallel_rank}, but --tensor-parallel-address is missing; "
                    "give all ranks the HOST:PORT where rank 0 shall listen, or leave both out to start all ranks here"
                )
            if size > 1 and self.socket is not None:
                raise ValueError(
                    "--socket is for one rank, and without --tensor-parallel-address the worker starts all; leave it "
                    "out to have them listen on --port and the ports that follow it"
                )
            return
        if address.startswith("file:/"):
            return
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ValueError(f"--tensor-parallel-address is {address!r}; it must be HOST:PORT or file:/DIRECTORY")


def parse_memory(flag: str, text: str, least: int = 1) -> int:
    """Bytes of a text such as "4GiB", "512MiB" or "1000000". Raises ValueError that names the flag."""
    number = text.strip().rstrip("abceghikmtABCEGHIKMT ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        num_bytes = int(float(number) * _MEMORY_UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        num_bytes = -1
    if num_bytes < least:
        size = "a positive size" if least else "0 or a size"
        raise ValueError(f"{flag} is {text!r}; it must be {size} such as 4GiB, 512MiB or a number of bytes")
    return num_bytes


def _check_range(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{flag} is {value}; it must be {low} to {high}")


def _check_socket(flag: str, path: str) -> None:
    if "," in path:
        raise ValueError(f"{flag} is {path!r}; it must have no comma, which separates addresses")
    num_bytes = len(os.fsencode(path))
    if not 0 < num_bytes <= MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"{flag} is {path!r}, {num_bytes} bytes long; the path of a Unix socket must have 1 to "
            f"{MAX_SOCKET_PATH_BYTES}"
        )


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{flag} is {value!r}; it must be one of {', '.join(choices)}")
