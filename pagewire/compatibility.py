"""The options of vLLM, nano-vllm and llama.cpp that Pagewire does not have, and their treatment.

`LLM`, the flags and files of `pagewire serve`, and the docs pages share this table. An option with the same name,
meaning and values in Pagewire is an ordinary option and is not listed here.
"""

import difflib
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The minimum similarity (difflib ratio) at which a name is suggested for a misspelt one.
_CLOSE = 0.75
# The names that other commands use for the address of a server, which is --url here.
_ADDRESSES = (
    *("address", "addr", "api-base", "api-url", "base-url", "connect", "endpoint", "host", "host-port", "hostname"),
    *("port", "remote", "scheduler", "scheduler-url", "server", "server-address", "server-url", "target", "uri"),
)
_MULTIPLES = {"k": 1e3, "m": 1e6, "g": 1e9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Foreign:
    """An option of another engine, such as vLLM, that Pagewire does not have. `text` gives the reason or an
    alternative.

    A value in `harmless` requests the behaviour that Pagewire already has, and is accepted silently. Any other value
    raises an error if `is_refused` is set. Otherwise, the value is ignored with a warning, since the results are
    correct without it.
    """

    text: str
    harmless: tuple[object, ...] = (None, False)
    is_refused: bool = False


def _refused(text: str, *harmless: object) -> Foreign:
    return Foreign(text, (None, False, *harmless), is_refused=True)


_NO_CODE = "Pagewire never runs code from checkpoints, and the supported architectures need none"
_TEXT_ONLY = "Pagewire supports only text, for generation and embeddings"
_OWN_CONFIG = "edit config.json in a copy of the checkpoint directory"
_RANKS = "models are distributed by `tensor_parallel_size` only"
_ON_THIS_MACHINE = "ranks are processes on this machine, which communicate over NCCL, or gloo on CPUs"
_MORE_SERVERS = "create several LLMs, or put a router in front of several servers"
_ON_DEVICE = "all weights stay on the device; `swap_space` is for the KV cache"
_PARSERS = "the chat template selects the parsers; override them with `tool_call_parser` and `reasoning_parser`"
_TEMPLATE = "requests set chat_template_kwargs; another template can have other defaults: see `chat_template`"
_GUIDANCE = "llguidance compiles all grammars"
_STATES = "no architecture with recurrent state is supported"
_DISK = "each rank maps the weight files into its memory"
_SHARED_BLOCKS = "all requests share the KV cache; see `kv_cache_memory`, `swap_space` and `enable_prefix_caching`"
_KERNELS = "see `attention_backend` and `cpu_products`"
# Option names, separated by spaces, and their treatment. A name that ends in ! is a flag without a value, a name that
# ends in * is a flag with several values.
_FOREIGN: tuple[tuple[str, Foreign], ...] = (
    ("trust_remote_code!", Foreign(_NO_CODE)),
    ("skip_tokenizer_init!", Foreign("prompts of token ids are not tokenized anyway")),
    ("seed", Foreign("seeds are set in requests; a request without a seed is random", (None, 0, -1))),
    ("disable_log_stats!", Foreign("statistics are exported as metrics, not logged", (None, False, True))),
    ("disable_log_requests!", Foreign("requests are logged only with `log_requests`", (None, False, True))),
    (
        "max_log_len log_config_file uvicorn_log_level disable_uvicorn_access_log! disable_access_log_for_endpoints "
        "enable_log_outputs! enable_log_deltas! log_error_stack! enable_logging_iteration_details! verbose! "
        "log_disable! log_file log_colors log_jsonl! verbosity log_prefix! log_timestamps! log_prompts_dir perf!",
        Foreign("logging is configured by `log_level`, `log_format` and `log_requests`", (None, False)),
    ),
    (
        "aggregate_engine_logging! show_hidden_metrics_for_version collect_detailed_traces* kv_cache_metrics! "
        "kv_cache_metrics_sample cudagraph_metrics! enable_mfu_metrics! enable_layerwise_nvtx_tracing! "
        "per_request_spec_decode_metrics! enable_per_request_metrics! enable_server_load_tracking! jit_monitor_mode "
        "jit_monitor_verbose! metrics! slots!",
        Foreign("all metrics of docs/metrics.md are always exported", (None, False, True)),
    ),
    ("disable_custom_all_reduce!", Foreign(_ON_THIS_MACHINE, (None, False, True))),
    ("distributed_executor_backend data_parallel_backend", Foreign(_ON_THIS_MACHINE, (None, "mp"))),
    (
        "worker_use_ray! engine_use_ray! ray_workers_use_nsight! worker_cls worker_extension_cls numa_bind! "
        "numa_bind_nodes* "
        "numa_bind_cpus* distributed_timeout_seconds cpu_distributed_timeout_seconds enable_nccl_comm_suspend! "
        "disable_nccl_for_dp_synchronization! mm_tensor_ipc",
        Foreign(_ON_THIS_MACHINE, (None, False, "auto")),
    ),
    ("enable_chunked_prefill!", Foreign("chunked prefill is always on", (None, True))),
    (
        "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold scheduler_delay_factor "
        "prefill_schedule_interval max_num_scheduled_tokens scheduler_reserve_full_isl!",
        Foreign("see `max_num_batched_tokens` and `max_decode_slowdown`", (None, False, 0, 1)),
    ),
    ("async_scheduling!", Foreign("scheduling is always asynchronous", (None, True))),
    ("disable_async_output_proc!", Foreign("outputs are always processed asynchronously")),
    ("num_scheduler_steps", Foreign("see `max_lease_ms`", (None, 1))),
    ("num_lookahead_slots multi_step_stream_outputs!", Foreign("see `max_lease_ms`", (None, False, True, 0))),
    ("stream_interval", Foreign("every token is streamed immediately", (None, 1))),
    ("scheduler_cls", Foreign("the scheduler is Pagewire's own; see `policy`")),
    (
        "compilation_config optimization_level performance_mode attention_config kernel_config ir_op_priority "
        "enable_flashinfer_autotune! additional_config override_neuron_config",
        Foreign("Pagewire does not use torch.compile", (None, False, {})),
    ),
    ("max_seq_len_to_capture cuda_graph_sizes* cudagraph_capture_sizes*", Foreign("see `max_graph_batch_size`")),
    ("model_impl", Foreign("Pagewire has its own model implementations", (None, "auto", "vllm"))),
    ("use_v2_block_manager!", Foreign("there is only one block manager", (None, False, True))),
    ("disable_hybrid_kv_cache_manager!", Foreign("there is only one block manager", (None, False, True))),
    ("disable_cascade_attn!", Foreign("there is no cascade attention", (None, False, True))),
    ("moe_backend linear_backend enable_bf16x3_router_gemm!", Foreign(_KERNELS, (None, False, "auto"))),
    ("flash_attn!", Foreign(_KERNELS, (None, False, True, "auto", "on"))),
    (
        "max_parallel_loading_workers safetensors_load_strategy safetensors_prefetch_num_threads use_tqdm_on_load! "
        "safetensors_prefetch_block_size ignore_patterns* pt_load_map_location model_loader_extra_config",
        Foreign(_DISK, (None, False, True, "auto", "lazy", {})),
    ),
    ("load_mode lazy_mode direct_io!", Foreign(_DISK, (None, "auto", "mmap"))),
    ("mmap!", Foreign(_DISK, (None, True))),
    ("mlock!", Foreign("weights stay in memory if the system has enough", (None, False))),
    ("guided_decoding_backend", Foreign(_GUIDANCE, (None, "auto", "guidance"))),
    ("guided_decoding_disable_fallback!", Foreign(_GUIDANCE, (None, False, True))),
    ("structured_outputs_config", Foreign(f"{_GUIDANCE}, which apply from the first token on")),
    (
        "limit_mm_per_prompt mm_processor_kwargs media_io_kwargs mm_processor_cache_gb disable_mm_preprocessor_cache! "
        "mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend "
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path skip_mm_profiling! "
        "mm_encoder_fp8_scale_save_margin mm_hasher_algorithm interleave_mm_strings! video_pruning_rate "
        "video_pruning_method mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize! "
        "disable_chunked_mm_input! "
        "allowed_local_media_path allowed_media_domains* enable_multimodal_encoder_data_parallel!",
        Foreign(_TEXT_ONLY, (None, False, {}, 0)),
    ),
    ("language_model_only!", Foreign(_TEXT_ONLY, (None, True))),
    ("prefix_caching_hash_algo prefix_match_unit", Foreign("a block is keyed by the xxhash of all tokens through it")),
    ("calculate_kv_scales!", Foreign("fp8 uses the scale 1; int8 uses one for each head and position")),
    ("max_logprobs", Foreign("requests may ask for up to 20 log-probabilities, or for all", (None, -1, *range(21)))),
    (
        "enable_prompt_tokens_details! enable_force_include_usage! enable_request_id_headers! "
        "return_tokens_as_token_ids!",
        Foreign("set the parameters of each request instead"),
    ),
    (
        "enable_auto_tool_choice! tool_parser_plugin reasoning_parser_plugin "
        "reasoning_config exclude_tools_when_tool_choice_none! jinja! reasoning_format",
        Foreign(_PARSERS, (None, False, True)),
    ),
    ("chat_template_content_format", Foreign(_PARSERS, (None, "auto"))),
    (
        "disable_fastapi_docs! enable_offline_docs! h11_max_incomplete_event_size h11_max_header_count "
        "fingerprint_mode "
        "fingerprint_value disable_frontend_multiprocessing! fail_on_environ_validation! ssl_refresh",
        Foreign("the OpenAI API has fixed limits and its own documentation pages", (None, False, True)),
    ),
    ("api_server_count renderer_num_workers", Foreign("run more front ends: `pagewire frontend`", (None, 1))),
    ("grpc!", Foreign("gRPC is always served", (None, False, True))),
    (
        "threads_batch threads_http cpu_mask cpu_range cpu_strict prio poll cpu_mask_batch cpu_range_batch "
        "cpu_strict_batch prio_batch poll_batch numa",
        Foreign("see `num_threads`; taskset and numactl choose the processors", (None, 0, -1)),
    ),
    (
        "no_host! swa_full! defrag_thold kv_unified_per_slot ctx_checkpoints swa_checkpoints checkpoint_min_step "
        "cache_ram cache_reuse slot_prompt_similarity slot_save_path fit_target fit_ctx moe_cache_mib "
        "check_tensors!",
        Foreign(_SHARED_BLOCKS, (None, False, -1, 0)),
    ),
    (
        "fit kv_offload! op_offload! repack! kv_unified! cache_idle_slots!",
        Foreign(_SHARED_BLOCKS, (None, True, "on")),
    ),
    ("ui! webui! ui_config ui_config_file webui_config webui_config_file ui_mcp_proxy! webui_mcp_proxy!",
     Foreign("there is no web page for chats: use `pagewire chat`, or a client of the OpenAI API", (None, False))),
    ("tags", Foreign("models have no tags; see `served_model_name`")),
    ("embd_normalize", _refused("embeddings always have unit length", 2)),
    ("timeout sse_ping_interval", Foreign("timeouts of connections are fixed; requests may set a timeout")),
    ("n_gpu_layers", Foreign("all layers are on one device; see `device`")),
    ("ubatch_size", Foreign("see `max_num_batched_tokens`")),
    ("cont_batching!", Foreign("continuous batching is always on", (None, True))),
    ("warmup!", Foreign("a worker on a GPU always warms up", (None, True))),
    ("tokenizer_mode", _refused("the tokenizer is the checkpoint's tokenizer.json", "auto", "hf", "fast", "slow")),
    ("generation_config", _refused("give sampling_params; the default is the checkpoint's own parameters", "auto")),
    (
        "override_generation_config temp temperature top_k top_p min_p repeat_penalty presence_penalty "
        "frequency_penalty predict ignore_eos! logit_bias",
        _refused("set it in requests, or edit generation_config.json in a copy of the checkpoint directory", {}),
    ),
    ("reverse_prompt special!", _refused("set stop and skip_special_tokens in requests")),
    ("escape!", Foreign("prompts are used as they are", (None, False, True))),
    ("props!", _refused("the options of a running server cannot change")),
    ("grammar grammar_file json_schema json_schema_file", _refused("set structured_outputs in requests")),
    (
        "top_n_sigma top_nsigma xtc_probability xtc_threshold typical typical_p repeat_last_n dry_multiplier dry_base "
        "dry_allowed_length dry_penalty_last_n dry_sequence_breaker adaptive_target adaptive_decay dynatemp_range "
        "dynatemp_exp mirostat mirostat_lr mirostat_ent samplers sampler_seq sampling_seq",
        _refused("sampling has temperature, top_k, top_p, min_p, penalties and logit_bias, which requests set", 0, -1),
    ),
    ("backend_sampling!", Foreign("tokens are always sampled on the device", (None, False, True))),
    ("context_shift! keep", _refused("a request ends when it fills the context: see `max_model_len`", 0)),
    ("spm_infill!", _refused("a prompt for infilling has the order prefix, suffix, middle")),
    ("tokenizer", _refused("the tokenizer comes from the checkpoint: put another tokenizer.json into its directory")),
    (
        "tokenizer_revision",
        _refused("the tokenizer comes from the checkpoint, in its revision", "main"),
    ),
    ("tokenizer_pool_size", Foreign("tokenization runs on its own thread", (None, 0))),
    ("tokenizer_pool_type tokenizer_pool_extra_config", Foreign("tokenization runs on its own thread")),
    ("code_revision", _refused(_NO_CODE, "main")),
    ("download_dir", _refused("set the variable HF_HOME, or give the checkpoint's directory")),
    ("hf_token", _refused("set the variable HF_TOKEN")),
    ("offline!", _refused("set the variable HF_HUB_OFFLINE=1")),
    ("cache_list!", _refused("`hf cache ls` lists the models that were downloaded")),
    ("list_devices!", _refused("`nvidia-smi -L` lists the devices; see `device`")),
    ("completion_bash!", _refused("`pagewire completion bash` prints the script")),
    ("hf_repo hf_file model_url docker_repo", _refused("give the id on the hub, or the file, as MODEL")),
    ("hf_config hf_config_path hf_overrides model_class_overrides", _refused(_OWN_CONFIG, {})),
    (
        "rope_scaling rope_theta rope_scale rope_freq_base rope_freq_scale yarn_orig_ctx yarn_ext_factor "
        "yarn_attn_factor yarn_beta_slow yarn_beta_fast override_kv disable_sliding_window!",
        _refused(_OWN_CONFIG, {}),
    ),
    ("config_format", _refused("config.json, or a GGUF file, says what the model is", "auto", "hf")),
    ("quantization_config", _refused("the checkpoint specifies the quantization", {})),
    ("allow_deprecated_quantization!", Foreign("the checkpoint specifies the quantization")),
    ("quantization_param_path", _refused("fp8 always uses the scale 1", {})),
    ("kv_cache_dtype_skip_layers*", _refused("all layers use `kv_cache_dtype`", [])),
    (
        "cache_type_k cache_type_v",
        _refused("give `kv_cache_dtype`, for keys and values: fp8, or int8 on a CPU", "f16", "bf16", "f32"),
    ),
    ("override_attention_dtype", _refused("attention is computed in `dtype`, with sums in float32")),
    ("pipeline_parallel_size", _refused(_RANKS, 1)),
    (
        "enable_expert_parallel! all2all_backend enable_eplb! eplb_config expert_placement_strategy "
        "num_redundant_experts "
        "eplb_window_size eplb_step_interval eplb_log_balancedness! enable_dbo! dbo_decode_token_threshold "
        "dbo_prefill_token_threshold enable_elastic_ep! enable_ep_weight_filter! enable_batch_sharded_sampling! "
        "dcp_comm_backend dcp_q_replicate! dcp_kv_cache_interleave_size cp_kv_cache_interleave_size split_mode "
        "tensor_split main_gpu rpc",
        _refused(_RANKS, {}),
    ),
    ("decode_context_parallel_size prefill_context_parallel_size", _refused(_RANKS, 1)),
    ("data_parallel_size data_parallel_size_local", _refused(_MORE_SERVERS, 1)),
    (
        "data_parallel_rank data_parallel_start_rank data_parallel_address data_parallel_rpc_port "
        "data_parallel_hybrid_lb! data_parallel_external_lb! data_parallel_multi_port_external_lb! "
        "data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s "
        "dp_supervisor_probe_failure_threshold dp_sync_interval headless!",
        _refused(_MORE_SERVERS),
    ),
    (
        "nnodes node_rank master_addr master_port",
        _refused("start the ranks yourself: `pagewire worker --tensor-parallel-address`", 1, 0),
    ),
    ("device_ids", _refused("set the variable CUDA_VISIBLE_DEVICES")),
    ("enable_fault_tolerance! fault_tolerance_config", Foreign("a lost worker is always replaced")),
    ("cpu_offload_gb cpu_offload_params*", _refused(_ON_DEVICE, 0, [])),
    (
        "offload_backend offload_group_size offload_num_in_group offload_prefetch_step offload_params* cpu_moe! "
        "n_cpu_moe "
        "n_cpu_ffn override_tensor",
        _refused(_ON_DEVICE, 0, "auto"),
    ),
    ("kv_offloading_backend", _refused("see `swap_space`", "native")),
    (
        "speculative_config speculative_model num_speculative_tokens speculative_model_quantization "
        "speculative_draft_tensor_parallel_size speculative_disable_mqa_scorer! speculative_max_model_len "
        "speculative_disable_by_batch_size ngram_prompt_lookup_max ngram_prompt_lookup_min spec_method spec_model "
        "spec_tokens spec_decoding_acceptance_method typical_acceptance_sampler_posterior_threshold "
        "typical_acceptance_sampler_posterior_alpha disable_logprobs_during_spec_decoding! use_fp64_gumbel! "
        "model_draft draft draft_n draft_max draft_min draft_n_min draft_p_min draft_p_split spec_type spec_default! "
        "hf_repo_draft gpu_layers_draft n_gpu_layers_draft device_draft threads_draft threads_batch_draft "
        "cache_type_k_draft cache_type_v_draft override_tensor_draft cpu_moe_draft! n_cpu_moe_draft cpu_mask_draft "
        "cpu_range_draft cpu_strict_draft prio_draft poll_draft cpu_mask_batch_draft cpu_strict_batch_draft "
        "prio_batch_draft poll_batch_draft lookup_cache_static lookup_cache_dynamic "
        "spec_draft_type_k spec_draft_type_v spec_draft_hf spec_draft_threads spec_draft_threads_batch "
        "spec_draft_cpu_mask spec_draft_cpu_range spec_draft_cpu_strict spec_draft_prio spec_draft_poll "
        "spec_draft_cpu_mask_batch spec_draft_cpu_strict_batch spec_draft_prio_batch spec_draft_poll_batch "
        "spec_draft_override_tensor spec_draft_cpu_moe! spec_draft_n_cpu_moe spec_draft_n_max spec_draft_n_min "
        "spec_draft_p_split spec_draft_p_min spec_draft_backend_sampling! spec_draft_sampling spec_draft_device "
        "spec_draft_ngl spec_draft_model spec_ngram_mod_n_min spec_ngram_mod_n_max spec_ngram_mod_n_match "
        "spec_ngram_simple_size_n spec_ngram_simple_size_m spec_ngram_simple_min_hits spec_ngram_map_k_size_n "
        "spec_ngram_map_k_size_m spec_ngram_map_k_min_hits spec_ngram_map_k4v_size_n spec_ngram_map_k4v_size_m "
        "spec_ngram_map_k4v_min_hits spec_ngram_size_n spec_ngram_size_m spec_ngram_min_hits",
        _refused("Pagewire has no speculative decoding", "none"),
    ),
    (
        "enable_lora! lora_modules* max_loras max_lora_rank lora_extra_vocab_size lora_dtype long_lora_scaling_factors "
        "max_cpu_loras fully_sharded_loras! default_mm_loras enable_lora_bias! enable_tower_connector_lora! "
        "lora_target_modules* specialize_active_lora! enable_mixed_moe_lora_format! enable_moe_shared_loras! "
        "qlora_adapter_name_or_path enable_prompt_adapter! prompt_adapters* max_prompt_adapters "
        "max_prompt_adapter_token lora lora_scaled lora_init_without_apply! control_vector control_vector_scaled "
        "control_vector_layer_range*",
        _refused("Pagewire serves one model, without adapters"),
    ),
    ("runner", _refused(_TEXT_ONLY, "auto", "generate", "pooling")),
    ("task", _refused(_TEXT_ONLY, "auto", "generate", "embed", "embedding")),
    ("convert", _refused(_TEXT_ONLY, "auto", "none", "embed")),
    ("enable_mm_embeds! enable_prompt_embeds! mm_encoder_only! mmproj mmproj_url media_path", _refused(_TEXT_ONLY)),
    (
        "no_mmproj! mmproj_auto! mmproj_offload! mmproj_device image_min_tokens image_max_tokens mtmd_batch_max_tokens "
        "video_fps video_timestamp_interval video_ffmpeg_dir",
        Foreign(_TEXT_ONLY, (None, False, True)),
    ),
    ("io_processor_plugin diffusion_config ec_transfer_config ec_manager_config tool_server", _refused(_TEXT_ONLY)),
    ("reranking! rerank! enable_flash_late_interaction!", _refused(_TEXT_ONLY)),
    ("embedding!", Foreign("embeddings are always served", (None, True))),
    (
        "pooler_config override_pooler_config pooling",
        _refused("the checkpoint's modules.json specifies the pooling; the default is the last token"),
    ),
    (
        "logits_processors* logits_processor_pattern",
        _refused("only SamplingParams controls sampling; use its logit_bias", []),
    ),
    (
        "logprobs_mode",
        _refused("log-probabilities are computed after penalties and bias, before temperature and filters"),
    ),
    (
        "guided_decoding_disable_any_whitespace!",
        _refused('set {"x-guidance": {"whitespace_flexible": false}} in the schema'),
    ),
    (
        "guided_decoding_disable_additional_properties!",
        _refused('set {"additionalProperties": false} in the schema'),
    ),
    ("kv_transfer_config", _refused("every worker runs both prefill and decode")),
    ("kv_events_config", _refused("clients subscribe to KV events on the public port")),
    ("weight_transfer_config", _refused("restart with the new weights")),
    ("enable_sleep_mode! enable_cumem_allocator!", _refused("end the process, or close the LLM, to free its memory")),
    ("kv_sharing_fast_prefill!", _refused("all positions of a prompt are computed in all layers")),
    ("prefix_cache_retention_interval", _refused("see `retention`, and sessions in docs/serving.md")),
    ("profiler_config", _refused("see `profile` and `profile_dir`")),
    ("enable_return_routed_experts! return_sampling_mask! enable_trace_replay!", _refused("see `record`")),
    (
        "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_backend mamba_ssu_algorithm mamba_cache_mode "
        "enable_mamba_cache_stochastic_rounding! mamba_cache_philox_rounds replayssm_buffer_len use_replayssm! "
        "gdn_prefill_backend kda_prefill_backend",
        Foreign(_STATES, (None, False, "auto")),
    ),
    ("api_key_file", _refused("set the variable PAGEWIRE_API_KEY, or `api_key`, to the keys, separated by commas")),
    ("default_chat_template_kwargs chat_template_kwargs cohere_format", _refused(_TEMPLATE, {})),
    (
        "reasoning reasoning_effort reasoning_budget reasoning_budget_message",
        _refused("requests set reasoning_effort or thinking_token_budget", "auto", "default", -1),
    ),
    ("reasoning_preserve! prefill_assistant! skip_chat_parsing!", Foreign(_PARSERS, (None, True))),
    ("tools tools_runtime mcp_servers_config mcp_servers_json agent!", _refused("clients run the tools")),
    ("models_dir models_preset models_max models_autoload!", _refused("one server serves one model", True, 4)),
    ("sleep_idle_seconds", _refused("end the process to free its memory", -1)),
    ("trust_request_chat_template!", _refused("clients over gRPC render the template themselves")),
    ("response_role cohere_is_reasoning_model!", _refused("the chat template determines the roles", "assistant", True)),
    (
        "ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers enable_ssl_refresh! ssl_key_file "
        "ssl_cert_file",
        _refused("see `tls_cert`, `tls_key` and `tls_client_ca`, for HTTP and gRPC", 0),
    ),
    (
        "root_path middleware* allow_credentials! allowed_methods allowed_headers api_prefix path reuse_port! "
        "cors_methods cors_headers cors_credentials!",
        _refused("put a proxy in front of the OpenAI API; see `allowed_origins`"),
    ),
    ("enable_tokenizer_info_endpoint!", Foreign("/tokenizer_info is always served", (None, False, True))),
    ("tokens_only!", _refused("use GetServerInfo, Tokenize and Generate over gRPC")),
    ("uds", _refused("services listen on ports; see `http_host` and `http_port`")),
)  # fmt: skip
FOREIGN = {name.rstrip("!*"): foreign for names, foreign in _FOREIGN for name in names.split()}


def _expand_unit(value: Any) -> Any:
    """Convert a number with a unit, such as "32k" (32,000) or "32K" (32,768), to an integer, as vLLM does. Return other
    values unchanged."""
    if not isinstance(value, str) or value[-1:] not in _MULTIPLES:
        return value
    try:
        return int(float(value[:-1]) * _MULTIPLES[value[-1]])
    except ValueError:
        return value


def _without_prefix(value: Any) -> str:
    """Return the name of a data type without the prefix "torch.". The result is "bfloat16" for both the torch dtype
    `torch.bfloat16` and the text "bfloat16"."""
    return str(value).removeprefix("torch.")


def _joined(value: Any) -> Any:
    """Join a list of values with commas. Return other values unchanged."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def _translation_to(name: str, *unset: object) -> Callable[[Any], dict[str, Any]]:
    """Return a function that translates an option of another engine to the Pagewire option `name`. The function
    converts the value of the option to a dict of Pagewire options. For a value in `unset`, the dict is empty, so that
    the Pagewire option keeps its default."""
    return lambda value: {} if value in unset else {name: _expand_unit(value)}


# Foreign options with equivalents: each function returns Pagewire options for a value.
MAPPED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "kvcache_block_size": _translation_to("block_size"),
    "num_kvcache_blocks": _translation_to("num_device_blocks", -1),
    "num_gpu_blocks_override": _translation_to("num_device_blocks"),
    "kv_cache_memory_bytes": lambda value: {"kv_cache_memory": str(_expand_unit(value))},
    "kv_offloading_size": lambda value: {"swap_space": f"{value}GiB"},
    "enforce_eager": lambda value: {"max_graph_batch_size": 0} if value else {},
    "max_cudagraph_capture_size": _translation_to("max_graph_batch_size"),
    "scheduling_policy": _translation_to("policy"),
    "preemption_mode": _translation_to("preemption"),
    "enable_log_requests": _translation_to("log_requests"),
    "max_num_queued_reqs": _translation_to("max_waiting_requests", 0),
    "max_num_queued_tokens": _translation_to("max_waiting_tokens", 0),
    "shutdown_timeout": _translation_to("drain_timeout"),
    "ctx_size": _translation_to("max_model_len", 0),
    "parallel": _translation_to("max_num_seqs", -1),
    "batch_size": _translation_to("max_num_batched_tokens"),
    "threads": _translation_to("num_threads", -1),
    "alias": _translation_to("served_model_name"),
    "cors_origins": _translation_to("allowed_origins", "localhost"),
    "cache_prompt": lambda value: {"enable_prefix_caching": bool(value)},
    "chat_template_file": lambda value: {"chat_template": str(value)},
}

# Pagewire options whose foreign namesakes allow other values.
CONVERTED: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda value: {"float": "float32"}.get(_without_prefix(value), _without_prefix(value)),
    "kv_cache_dtype": lambda value: {"fp8_e4m3": "fp8"}.get(_without_prefix(value), _without_prefix(value)),
    "quantization": lambda value: value or None,
    "load_format": lambda value: "auto" if value == "safetensors" else value,
    "attention_backend": lambda value: value.lower() if isinstance(value, str) else value,
    "served_model_name": _joined,
    "api_key": _joined,
    # vLLM expects a JSON list.
    "allowed_origins": lambda value: _joined(json.loads(value) if str(value).startswith('["') else value),
    "max_model_len": lambda value: None if value in (-1, "-1", "auto") else _expand_unit(value),
    "max_num_batched_tokens": _expand_unit,
    "max_num_seqs": _expand_unit,
}
# Foreign values of Pagewire options.
_VALUES = {
    "quantization": _refused(
        "the checkpoint specifies the quantization; int8 and int4 quantize float weights while they load",
        "int8",
        "int4",
    ),
    "load_format": _refused("weights are read from safetensors, or a GGUF file", "auto", "safetensors", "dummy"),
}
# Verbs and flags of other commands, and their equivalents here.
FOREIGN_VERBS = {
    "pagewire ps": "`pagewire status` shows what a server is doing",
    "pagewire pull": "`pagewire serve` and `pagewire run` download a model when they start; so does `hf download`",
    "pagewire list": "`hf cache ls` lists the models that were downloaded",
    "pagewire ls": "`hf cache ls` lists the models that were downloaded",
    "pagewire rm": "`hf cache rm` deletes models that were downloaded",
    "pagewire bench serve": "`vllm bench serve` and `guidellm` measure the OpenAI API: see docs/performance.md",
    "pagewire demo": "`pagewire run storyteller` serves the bundled model, for a chat or a prompt",
    "pagewire stop": "Ctrl-C or SIGTERM ends a server; `pagewire run` ends its own",
    "pagewire show": "`pagewire status` shows a running server, and GET /v1/models describes its model",
    "pagewire create": "instead of a Modelfile: `pagewire chat --system TEXT`, `pagewire serve --chat-template FILE`",
    "pagewire cp": "copy the directory; `pagewire serve --served-model-name NAME` gives a model another name",
    "pagewire push": "`hf upload` publishes a model",
    "pagewire generate": "`pagewire complete` continues a text, `pagewire chat` answers a message",
    "pagewire launch": "start the application with the URL of `pagewire serve`: see docs/openai.md",
    **dict.fromkeys(
        (
            "pagewire llama-server",
            "pagewire server",
            "pagewire start",
            "pagewire -m",
            "pagewire --model",
            "pagewire -hf",
        ),
        "`pagewire serve MODEL` serves a model; it has the flags of llama-server, or explains them",
    ),
    "pagewire llama-cli": "`pagewire run MODEL` serves a model and chats with it",
    "pagewire run-batch": "`pagewire.LLM` generates lists of prompts: see docs/python.md",
    "pagewire collect-env": "`pagewire --version` shows the version and the commit",
}
FOREIGN_RUN_FLAGS = {
    "--keepalive": "the server ends with the chat; `pagewire serve` keeps a model loaded",
    "--format": "--json-object or --json-schema FILE constrains the answer",
    "--nowordwrap": "lines are not wrapped",
    **dict.fromkeys(("--think", "--hidethinking"), "the chat template decides whether the model reasons"),
}
FOREIGN_BENCH_FLAGS = {
    **dict.fromkeys(("--save-result", "--result-dir", "--result-filename"), "--output-json FILE writes the figures"),
    **dict.fromkeys(
        ("--chart", "--metadata", "--save-detailed"),
        "`vllm bench serve` and `guidellm` report more: docs/performance.md",
    ),
}
_SECRETS = ("api_key", "hf_token")  # messages never show their values
# The flags without a value, and the flags with several values.
SWITCHES, LISTS = (
    {name[:-1] for names in (*(each for each, _ in _FOREIGN), more) for name in names.split() if name[-1] == mark}
    for mark, more in (("!", "enforce_eager! enable_log_requests! cache_prompt!"), ("*", "served_model_name* api_key*"))
)
# Synonyms of option values.
VALUE_SYNONYMS = {"gpu": "cuda"}
# Synonyms of flags, first vLLM's, then llama.cpp's.
SYNONYMS = {
    "-tp": "tensor_parallel_size",
    "-q": "quantization",
    "-pp": "pipeline_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-dp": "data_parallel_size",
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-dpm": "data_parallel_multi_port_external_lb",
    "-ep": "enable_expert_parallel",
    "-n": "nnodes",
    "-r": "node_rank",
    "-asc": "api_server_count",
    "-O": "optimization_level",
    "-cc": "compilation_config",
    "-ac": "attention_config",
    "-sc": "speculative_config",
    "-dc": "diffusion_config",
    "-spec-draft-tp": "speculative_draft_tensor_parallel_size",
    "-m": "model",
    "-c": "ctx_size",
    "-ngl": "n_gpu_layers",
    "--gpu-layers": "n_gpu_layers",
    "-t": "threads",
    "-np": "parallel",
    "-b": "batch_size",
    "-ub": "ubatch_size",
    "-fa": "flash_attn",
    "-a": "alias",
    "-hf": "hf_repo",
    "-hff": "hf_file",
    "-mu": "model_url",
    "-ctk": "cache_type_k",
    "-ctv": "cache_type_v",
    "-cb": "cont_batching",
    "-md": "model_draft",
    "-sm": "split_mode",
    "-ts": "tensor_split",
    "-mg": "main_gpu",
    "-ot": "override_tensor",
    "-ncmoe": "n_cpu_moe",
    "-cmoe": "cpu_moe",
    "--n-predict": "predict",
    "--embeddings": "embedding",
    "-v": "verbose",
    "--log-verbose": "verbose",
    "-lv": "verbosity",
    "--log-verbosity": "verbosity",
    "-tb": "threads_batch",
    "-C": "cpu_mask",
    "-Cr": "cpu_range",
    "-Cb": "cpu_mask_batch",
    "-Crb": "cpu_range_batch",
    "-dt": "defrag_thold",
    "-lm": "load_mode",
    "-dio": "direct_io",
    "-lzm": "lazy_mode",
    "-dev": "device",
    "-ncffn": "n_cpu_ffn",
    "-fit": "fit",
    "-fitt": "fit_target",
    "-fitc": "fit_ctx",
    "-kvo": "kv_offload",
    "-kvu": "kv_unified",
    "-cram": "cache_ram",
    "-ctxcp": "ctx_checkpoints",
    "-cms": "checkpoint_min_step",
    "-sps": "slot_prompt_similarity",
    "-dr": "docker_repo",
    "-hfr": "hf_repo",
    "-hft": "hf_token",
    "-cl": "cache_list",
    "-mm": "mmproj",
    "-mmu": "mmproj_url",
    "-mmdev": "mmproj_device",
    "-to": "timeout",
    "-rea": "reasoning",
    "-sp": "special",
    "-ag": "agent",
    "-bs": "backend_sampling",
    "-lcs": "lookup_cache_static",
    "-lcd": "lookup_cache_dynamic",
    "-hfd": "hf_repo_draft",
    "-hfrd": "hf_repo_draft",
    "-td": "threads_draft",
    "-tbd": "threads_batch_draft",
    "-Cd": "cpu_mask_draft",
    "-Crd": "cpu_range_draft",
    "-Cbd": "cpu_mask_batch_draft",
    "-devd": "device_draft",
    "-ngld": "n_gpu_layers_draft",
    "-ctkd": "cache_type_k_draft",
    "-ctvd": "cache_type_v_draft",
    "-otd": "override_tensor_draft",
    "-cmoed": "cpu_moe_draft",
    "-ncmoed": "n_cpu_moe_draft",
    "--spec-draft-ncmoe": "n_cpu_moe_draft",
}

SAMPLING_FIELDS: dict[str, Foreign] = {
    "detokenize": Foreign("outputs are always detokenized if there is a tokenizer", (None, True)),
    "spaces_between_special_tokens": Foreign("the tokenizer determines the spaces", (None, True)),
    "output_kind": Foreign("generate returns complete outputs; use Client.stream for deltas"),
    "skip_reading_prefix_cache": Foreign("set cache_salt in requests, or enable_prefix_caching=False in LLM"),
    "best_of": _refused("use n, or beam_width for the most likely outputs", 1),
    "use_beam_search": _refused("call LLM.beam_search, or set beam_width, and n for how many hypotheses to return"),
    "bad_words": _refused("set logit_bias for their tokens", []),
    "allowed_token_ids": _refused("set logit_bias for these tokens, or for all others", []),
    "logits_processors": _refused("only these parameters control sampling; use logit_bias", []),
    "guided_decoding": _refused("use structured_outputs with json, regex, choice, grammar or json_object"),
    "truncate_prompt_tokens": _refused("truncate the prompt's token ids yourself"),
    "extra_args": _refused("there are no additional parameters", {}),
}

STRUCTURED_OUTPUTS_FIELDS: dict[str, Foreign] = {
    "disable_fallback": Foreign("llguidance compiles a grammar or refuses it", (None, False, True)),
    "disable_any_whitespace": _refused('set {"x-guidance": {"whitespace_flexible": false}} in the schema'),
    "disable_additional_properties": _refused('set {"additionalProperties": false} in the schema'),
    "whitespace_pattern": _refused('set {"x-guidance": {"whitespace_pattern": "..."}} in the schema'),
}


@dataclass(frozen=True, slots=True)
class Spelling:
    """The form in which error messages write options, such as command line flags or Python arguments. `name` formats
    the name of an option. `given` formats the name with a value, which may be None."""

    name: Callable[[str], str]
    given: Callable[[str, Any], str]


IN_PYTHON = Spelling(str, lambda name, value: name if value is None else f"{name}={value!r:.80}")


@dataclass(frozen=True, slots=True)
class Translation:
    """The result of translating a user's options to Pagewire options.

    `values` has the Pagewire options by name. `sources` has, for each of these names, the user's option from which it
    was translated. `ignored` has a warning line for each option that is ignored.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, str]
    ignored: Sequence[str]


def translate(given: Mapping[str, Any], spelling: Spelling) -> Translation:
    """Translate the options that a user gave, which may be options of other engines, to Pagewire options.

    Names that no engine uses are returned unchanged. Raise ValueError for an option that Pagewire refuses, and if two
    options set the same Pagewire option to different values.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    ignored: list[str] = []
    for name, value in given.items():
        shown = spelling.given(name, None if name in _SECRETS else value)
        # A tokenizer equal to the model selects the model's own tokenizer, which is always used.
        if name in FOREIGN | _VALUES and not (name == "tokenizer" and str(value) == given.get("model")):
            ignored += _check_foreign((FOREIGN | _VALUES)[name], value, shown, spelling.name)
        if name in FOREIGN:
            continue
        for ours, new in _pagewire_options(name, value).items():
            if ours in values and values[ours] != new:
                first = spelling.given(sources[ours], given[sources[ours]])
                raise ValueError(f"{first} and {shown} set {spelling.name(ours)} to different values: give only one")
            values[ours], sources[ours] = new, name
    return Translation(values, sources, ignored)


def _pagewire_options(name: str, value: Any) -> dict[str, Any]:
    """Translate one option that a user gave to Pagewire options, and return them as a dict. If the option belongs to
    another engine and its value is None, the dict is empty, so that the default applies."""
    if name in MAPPED:
        return {} if value is None else MAPPED[name](value)
    return {name: CONVERTED[name](value) if name in CONVERTED and value is not None else value}


def judge(table: Mapping[str, Foreign], values: Iterable[object], stacklevel: int) -> None:
    """Check the values that a Python caller gave for options of other engines. `values` has one value for each option
    in `table`, in the same order.

    Issue a warning for a value that Pagewire ignores although the value asks for different behaviour. Raise ValueError
    for a value that Pagewire refuses.
    """
    for name, value in zip(table, values, strict=True):
        for line in _check_foreign(table[name], value, IN_PYTHON.given(name, value), str):
            warnings.warn(line, stacklevel=stacklevel + 1)


def _check_foreign(foreign: Foreign, value: Any, shown: str, spelled: Callable[[str], str]) -> list[str]:
    """Check the value that a user gave for an option that only other engines have. Return a list with a warning line if
    Pagewire ignores the value although the value asks for different behaviour. Return an empty list if Pagewire already
    behaves as the value asks.

    Raise ValueError if Pagewire refuses the value.
    """
    # True equals 1 in Python, but has another meaning here.
    if any(
        isinstance(value, bool) == isinstance(harmless, bool) and value == harmless for harmless in foreign.harmless
    ):
        return []
    text = re.sub(r"`(\w+)`", lambda match: spelled(match[1]), foreign.text)
    if foreign.is_refused:
        raise ValueError(f"{shown} is not supported: {text}")
    return [f"{shown} is ignored: {text}"]


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for a misspelt word, where X is the most similar known word. Return an empty text if
    no known word is similar.

    A word that other commands use for a server's address suggests "url" if that is a known word.
    """
    by_letters = {name.strip("-/").replace("_", "-").lower(): name for name in known}
    letters = word.strip("-/").replace("_", "-").lower()
    near = difflib.get_close_matches(letters, by_letters, n=1, cutoff=_CLOSE)
    if not near and difflib.get_close_matches(letters, _ADDRESSES, n=1, cutoff=_CLOSE):
        near = ["url"] if "url" in by_letters else []
    return f"; did you mean {by_letters[near[0]]}?" if near else ""
