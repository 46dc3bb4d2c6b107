"""The worker's configuration: one frozen dataclass with its validation. Importing this module does not import torch."""

import os
from dataclasses import dataclass

from pagewire.common.option_limits import PORT, URL, Limit, between, check_options, option
from pagewire.common.process.memory_size import parse_memory
from pagewire.common.wire.transport.addresses import MAX_SOCKET_PATH_BYTES

_MAX_BLOCKS = (1 << 31) - 2
_MUST_BE = "; it must be"
# The packages that each backend needs besides torch. A backend is `worker_service/attention/backends/NAME.py`.
ATTENTION_BACKENDS = {"cpu": "", "triton": "triton", "flash_attn": "flash-attn, and triton,", "torch": ""}
_BLOCK_SIZE = 16
_BLOCK_SIZES = {"flash_attn": 256}  # for backends that support no other block size


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The options of a worker.

    Each field is a flag, an environment variable and a YAML key. A value of None is replaced by a default computed at
    the start.
    """

    model: str = option("", "checkpoint directory, GGUF file, or id of a Hugging Face model, such as Qwen/Qwen3-0.6B")
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(50061, "port to listen on; 0 picks a free one", PORT)
    socket: str | None = option(
        None,
        "path of a Unix socket to listen on instead of --host and --port, which a scheduler dials by --worker "
        "unix:PATH; who may write to it, or to its directory, commands the worker",
    )
    device: str = option(
        "auto", "where to compute; auto: cuda if there is a GPU, otherwise cpu", choices=("auto", "cpu", "cuda")
    )
    dtype: str = option(
        "auto",
        "data type to compute in; auto: the checkpoint's, or float32 on a CPU without fast arithmetic for that; "
        "float16, or half: on a CPU float32 over weights held in 16 bits",
        choices=("auto", "float32", "bfloat16", "float16", "half"),
    )
    load_format: str = option(
        "auto",
        "auto: read the checkpoint's weights; dummy: make random weights, to measure speed with only a config.json",
        choices=("auto", "dummy"),
    )
    quantization: str | None = option(
        None,
        "what weights of floats are quantised to while they load, in groups of 32: int8, or int4 with embeddings and "
        "head in 8 bits; on a CPU they are kept in the user's cache for the next start (default: weights stay as they "
        "are)",
        choices=("int8", "int4"),
    )
    block_size: int | None = option(
        None,
        "how many tokens a block of the KV cache holds (default: 16; 256 for the attention backend flash_attn)",
        between(1, 1024),
    )
    num_device_blocks: int | None = option(
        None, "number of blocks of the KV cache (default: as many as --kv-cache-memory holds)", between(1, _MAX_BLOCKS)
    )
    num_host_blocks: int | None = option(
        None, "number of blocks in host memory to swap to; an alternative to --swap-space", between(0, _MAX_BLOCKS)
    )
    swap_space: str | None = option(
        None,
        "host memory for swapped KV cache, such as 2GiB; 0 turns swapping off (default: none on a CPU; on a GPU 10 % "
        "of the available memory divided by the ranks of the machine, at most 4GiB)",
    )
    kv_cache_memory: str | None = option(
        None,
        "memory for the KV cache, such as 4GiB (default: on a CPU 30 % of the available memory, at most 4GiB; on a GPU "
        "whatever --gpu-memory-utilization leaves)",
    )
    kv_cache_dtype: str = option(
        "auto",
        "data type of the KV cache; auto: the one the model computes in. A smaller one saves memory and bandwidth but "
        "is less exact: 16 bits on a CPU that computes in float32; fp8 (e4m3, scale 1); on a CPU int8 (with a scale "
        "for each head and position)",
        choices=("auto", "bfloat16", "float16", "fp8", "int8"),
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of the GPU's memory to use, for weights and KV cache together",
        Limit("above 0 and at most 1", lambda value: 0.0 < value <= 1.0),
    )
    max_model_len: int | None = option(
        None,
        "longest sequence, prompt and output together, in tokens (default: the checkpoint's limit)",
        between(1, 1 << 24),
    )
    max_num_seqs: int = option(256, "how many sequences can run at the same time", between(1, 1 << 16))
    max_num_batched_tokens: int = option(2048, "how many tokens one step can compute", between(1, 1 << 20))
    max_graph_batch_size: int = option(
        256,
        "largest decoding batch that a GPU replays as a CUDA graph; larger ones launch each kernel; 0 turns graphs off",
        between(0, 1 << 16),
    )
    max_graph_tokens: int = option(
        512,
        "most tokens of a step with prompts that a GPU replays as a CUDA graph; larger ones launch each kernel; 0: "
        "such steps have no graphs",
        between(0, 1 << 16),
    )
    attention_backend: str = option(
        "auto",
        "implementation of attention: C kernels (cpu), Triton kernels (triton), the flash-attn package (flash_attn, "
        "in blocks of 256) or plain torch; auto: cpu or triton if it supports the model, otherwise torch",
        choices=("auto", *ATTENTION_BACKENDS),
    )
    cpu_products: str = option(
        "auto",
        "whose matrix products a CPU computes with; auto: our C kernels', in which a token's logits are the same bits "
        "whatever it shares a step with; onednn: oneDNN's, which are faster where a CPU has AMX, without that promise",
        choices=("auto", "onednn"),
    )
    tensor_parallel_size: int = option(
        1, "number of ranks to split the model across; each is a process of its own", between(1, 1024)
    )
    tensor_parallel_rank: int = option(0, "which rank this process is, counted from 0")
    tensor_parallel_address: str | None = option(
        None,
        "HOST:PORT on which rank 0 listens for the other ranks, or file:DIRECTORY of ranks that share a machine; the "
        "same for all ranks. Without it the worker starts all ranks on this machine, on --port and the ports that "
        "follow it",
    )
    num_threads: int | None = option(
        None,
        "number of CPU threads to compute with (default: one per core, or as many as the CPU quota pays for)",
        between(1, 1024),
    )
    profile: int = option(
        0,
        "number of steps to trace with torch's profiler, once, after the first 20; 0 turns it off. Writing many "
        "hundreds of steps takes so long that the scheduler gives the worker up",
        between(0, 100_000),
    )
    profile_dir: str = option(".", "directory for the trace that --profile writes")
    tls_cert: str | None = option(None, "PEM file with the server's certificate chain; turns TLS on")
    tls_key: str | None = option(None, "PEM file with the server's private key")
    tls_client_ca: str | None = option(
        None, "PEM file of the authority that clients' certificates must come from; turns mutual TLS on"
    )
    tls_client_names: str | None = option(
        None,
        "names of the clients to admit, as in their certificates, separated by commas (default: all that "
        "--tls-client-ca signed)",
    )
    link_secret_file: str | None = option(
        None,
        "file with the secret that a scheduler must show, which has a file with the same one; read whenever one "
        "connects (default: who connects may command the worker, with the certificate that is asked for)",
    )
    otlp_traces_endpoint: str | None = option(
        None, "where to send traces: http://HOST:PORT of a collector, OTLP over gRPC; needs the extra `tracing`", URL
    )
    health_host: str = option("127.0.0.1", "address of --health-port")
    health_port: int = option(
        0, "plaintext port for health probes that cannot use TLS; 0 turns it off (--port answers probes too)", PORT
    )

    def choose_block_size(self) -> int:
        """Return the requested block size, or the default of the attention backend."""
        return self.block_size or _BLOCK_SIZES.get(self.attention_backend, _BLOCK_SIZE)

    def validate(self) -> None:
        """Raise ValueError that names the flag, its value and the permitted values."""
        if not self.model:
            raise ValueError("--model is empty; give a checkpoint directory or a GGUF file")
        check_options(self, _MUST_BE)
        if self.socket is not None:
            _check_socket(self.socket)
        if self.swap_space is not None:
            parse_memory("--swap-space", self.swap_space, least=0)
            if self.num_host_blocks is not None:
                raise ValueError(
                    f"--swap-space is {self.swap_space} and --num-host-blocks is {self.num_host_blocks}; give only one"
                )
        if self.kv_cache_memory is not None:
            parse_memory("--kv-cache-memory", self.kv_cache_memory)
            if self.num_device_blocks is not None:
                raise ValueError(
                    f"--kv-cache-memory is {self.kv_cache_memory} and --num-device-blocks is {self.num_device_blocks}; "
                    "give only one"
                )
        self._validate_ranks()
        self._validate_quantization()
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("--tls-cert and --tls-key belong together; give both or neither")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        if self.tls_client_names and not self.tls_client_ca:
            raise ValueError("--tls-client-names needs --tls-client-ca")

    def _validate_quantization(self) -> None:
        """Raise ValueError if `quantization` is combined with an option that cannot multiply with quantised weights."""
        if self.quantization is not None and self.cpu_products == "onednn":
            raise ValueError(
                f"--quantization is {self.quantization} and --cpu-products is onednn, which cannot multiply "
                "with quantised weights: leave one of them out"
            )
        if self.quantization is not None and self.tensor_parallel_size > 1:
            raise ValueError(
                f"--quantization is {self.quantization} and --tensor-parallel-size is {self.tensor_parallel_size}; "
                "--quantization supports one rank only: leave one of them out"
            )

    def _validate_ranks(self) -> None:
        size, address = self.tensor_parallel_size, self.tensor_parallel_address
        if not 0 <= self.tensor_parallel_rank < size:
            raise ValueError(f"--tensor-parallel-rank is {self.tensor_parallel_rank}{_MUST_BE} 0 to {size - 1}")
        if address is None:
            if self.tensor_parallel_rank > 0:
                raise ValueError(
                    f"--tensor-parallel-rank is {self.tensor_parallel_rank}, but --tensor-parallel-address is missing; "
                    "give all ranks the HOST:PORT on which rank 0 listens, or leave both out to start all ranks here"
                )
            if size > 1 and self.socket is not None:
                raise ValueError(
                    "--socket is for one rank, but without --tensor-parallel-address the worker starts all ranks; "
                    "leave --socket out, so that the ranks listen on --port and the ports that follow it"
                )
            return
        if address.startswith("file:/"):
            return
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ValueError(f"--tensor-parallel-address is {address!r}; it must be HOST:PORT or file:/DIRECTORY")


def _check_socket(path: str) -> None:
    if "," in path:
        raise ValueError(f"--socket is {path!r}; it must have no comma, because commas separate addresses")
    num_bytes = len(os.fsencode(path))
    if not 0 < num_bytes <= MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"--socket is {path!r}, {num_bytes} bytes long; the path of a Unix socket must have 1 to "
            f"{MAX_SOCKET_PATH_BYTES}"
        )
