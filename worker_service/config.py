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
    """The options of a worker process.

    Each field is a command-line flag, an environment variable and a YAML key. A default of None means that the worker
    computes the value when it starts.
    """

    model: str = option("", "checkpoint directory, GGUF file, or id of a Hugging Face model, such as Qwen/Qwen3-0.6B")
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(50061, "port to listen on; 0 picks a free one", PORT)
    socket: str | None = option(
        None,
        "path of a Unix socket to listen on instead of --host and --port; a scheduler connects to it with --worker "
        "unix:PATH. Any user with write access to the socket or its directory can control the worker",
    )
    device: str = option(
        "auto", "where to compute; auto: cuda if there is a GPU, otherwise cpu", choices=("auto", "cpu", "cuda")
    )
    dtype: str = option(
        "auto",
        "data type to compute in; auto: the checkpoint's data type, or float32 on a CPU without fast arithmetic for "
        "it; float16, or half: on a CPU, compute in float32 and keep the weights in 16 bits",
        choices=("auto", "float32", "bfloat16", "float16", "half"),
    )
    load_format: str = option(
        "auto",
        "auto: read the checkpoint's weights; dummy: make random weights, to measure speed with only a config.json",
        choices=("auto", "dummy"),
    )
    quantization: str | None = option(
        None,
        "quantise float weights while they load, in groups of 32: int8, or int4 with embeddings, output head and some "
        "other matrices in 6 bits; on a CPU the result is stored in the user's cache for the next start (default: do "
        "not quantise)",
        choices=("int8", "int4"),
    )
    calibrate: str | None = option(
        None,
        "file of `pagewire calibrate`, with which --quantization int4 rounds the weights of large inputs more exactly",
    )
    block_size: int | None = option(
        None,
        "number of tokens in a block of the KV cache (default: 16; 256 for the attention backend flash_attn)",
        between(1, 1024),
    )
    num_device_blocks: int | None = option(
        None, "number of blocks of the KV cache (default: as --kv-cache-memory allows)", between(1, _MAX_BLOCKS)
    )
    num_host_blocks: int | None = option(
        None, "number of blocks of swap space in host memory; an alternative to --swap-space", between(0, _MAX_BLOCKS)
    )
    swap_space: str | None = option(
        None,
        "host memory for swapped KV cache, such as 2GiB; 0 turns swapping off (default: 0 on a CPU; on a GPU 10 % of "
        "the available memory divided by the number of ranks on the machine, at most 4GiB)",
    )
    kv_cache_memory: str | None = option(
        None,
        "memory for the KV cache, such as 4GiB (default: on a CPU 30 % of the available memory, at most 4GiB; on a GPU "
        "the rest of the memory that --gpu-memory-utilization allows)",
    )
    kv_cache_dtype: str = option(
        "auto",
        "data type of the KV cache; auto: the data type that the model computes in. A smaller data type saves memory "
        "and bandwidth but is less exact: 16 bits on a CPU that computes in float32; fp8 (e4m3, scale 1); on a CPU "
        "int8 (with a scale for each head and position)",
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
    max_num_seqs: int = option(256, "maximum number of sequences that run at the same time", between(1, 1 << 16))
    max_num_batched_tokens: int = option(2048, "maximum number of tokens in one step", between(1, 1 << 20))
    max_graph_batch_size: int = option(
        256,
        "largest decode batch that a GPU replays as a CUDA graph; larger batches launch each kernel; 0 turns graphs "
        "off",
        between(0, 1 << 16),
    )
    max_graph_tokens: int = option(
        512,
        "maximum number of tokens of a step with prompts that a GPU replays as a CUDA graph; larger steps launch each "
        "kernel; 0 turns graphs for such steps off",
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
        "implementation of matrix multiplication on a CPU; auto: the C kernels, with which a token's logits do not "
        "depend on the other tokens of the step, to the last bit; onednn: oneDNN, which is faster on a CPU with AMX, "
        "but without that guarantee",
        choices=("auto", "onednn"),
    )
    tensor_parallel_size: int = option(
        1, "number of ranks to split the model across; each rank is a separate process", between(1, 1024)
    )
    tensor_parallel_rank: int = option(0, "rank of this process, counted from 0")
    tensor_parallel_address: str | None = option(
        None,
        "HOST:PORT on which rank 0 listens for the other ranks, or file:DIRECTORY for ranks on one machine; the same "
        "for all ranks. Without this option the worker starts all ranks on this machine, on --port and the ports that "
        "follow it",
    )
    num_threads: int | None = option(
        None,
        "number of CPU threads to compute with (default: one per core, or fewer if a CPU quota allows less)",
        between(1, 1024),
    )
    profile: int = option(
        0,
        "number of steps to trace with torch's profiler, once, after the first 20; 0 turns it off. Writing a "
        "trace of many hundreds of steps takes so long that the scheduler considers the worker lost",
        between(0, 100_000),
    )
    profile_dir: str = option(".", "directory for the trace that --profile writes")
    tls_cert: str | None = option(None, "PEM file with the server's certificate chain; turns TLS on")
    tls_key: str | None = option(None, "PEM file with the server's private key")
    tls_client_ca: str | None = option(
        None, "PEM file of the authority that must have signed clients' certificates; turns mutual TLS on"
    )
    tls_client_names: str | None = option(
        None,
        "names in the certificates of permitted clients, separated by commas (default: any certificate signed by "
        "--tls-client-ca)",
    )
    link_secret_file: str | None = option(
        None,
        "file with a secret, which must equal the secret in the scheduler's --link-secret-file; read at each "
        "connection (default: no secret is required; any client that passes the TLS options can control the worker)",
    )
    otlp_traces_endpoint: str | None = option(
        None, "where to send traces: http://HOST:PORT of a collector, OTLP over gRPC; needs the extra `tracing`", URL
    )
    health_host: str = option("127.0.0.1", "address of --health-port")
    health_port: int = option(
        0, "plaintext port for health probes that cannot use TLS; 0 turns it off (--port answers probes too)", PORT
    )

    def choose_block_size(self) -> int:
        """Return the number of tokens in a KV cache block: the configured size, or the attention backend's default."""
        return self.block_size or _BLOCK_SIZES.get(self.attention_backend, _BLOCK_SIZE)

    def validate(self) -> None:
        """Check the values of all options.

        Raises ValueError for the first invalid value. The message names the flag, its value and the permitted values.
        """
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
        """Raise ValueError if `quantization` is combined with an option that does not support quantised weights."""
        if self.quantization is not None and self.cpu_products == "onednn":
            raise ValueError(
                f"--quantization is {self.quantization} and --cpu-products is onednn, which cannot multiply "
                "with quantised weights: leave one of them out"
            )
        if self.calibrate is not None and self.quantization != "int4":
            raise ValueError("--calibrate needs --quantization int4: give both or neither")
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
