"""Written by docs/generate_typed_options.py."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

APART: tuple[str, ...]

class LLMOptions(TypedDict, total=False):
    """Options of `LLM(...)`, beside its model and its plugins."""

    revision: str | None
    """Branch, tag or commit of a hub id."""
    served_model_name: list[str] | None
    """Model name in the HTTP API. If several names are given, responses use the first."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    """Precision of weights and activations. auto: the checkpoint's."""
    max_model_len: int | None
    """Maximum tokens of prompt plus output."""
    max_encoder_len: int | None
    """Maximum tokens of an encoder prompt."""
    generation_config: str
    """Sampling defaults: checkpoint, none, or a folder of generation_config.json."""
    override_generation_config: str | Mapping[str, Any]
    """Sampling defaults to put over these: a JSON object."""
    hf_overrides: str | Mapping[str, Any]
    """Fields to merge into config.json: a JSON object."""
    seed: int | None
    """Default seed of requests."""
    trust_remote_code: bool
    """Run Python code that comes with the checkpoint."""
    runner: Literal["auto", "generate", "pooling"]
    """Runner type: generate text or pool. auto: by the checkpoint's architecture."""
    convert: str
    """Pooling adapter that converts the model: none, embed, classify or a plugin's. auto: the
    one that the runner type needs."""
    extra_tasks: list[str]
    """Pooling tasks that a generating engine serves: embed."""
    model_impl: str
    """Model implementation: auto, or a fallback by name, such as 'transformers'. auto: the class
    registered for the architecture, else a fallback."""
    verify_fallback: bool
    """Compare a fallback's first logits with those of its model alone, and refuse it if they
    differ."""
    load_format: str
    """Load format of the weights, by name. dummy: random numbers, for measurements. auto: the
    first that reads MODEL."""
    quantization: str
    """Quantization of the weights, by name: the checkpoint's, or one applied at load. auto: the
    checkpoint's, or none."""
    quantization_skip: list[str]
    """Layers that stay as they are where weights are quantized at load: the name in the model or
    the checkpoint ('lm_head'), with * and ? ('*.down_proj'), or 're:' and a regular expression."""
    quantization_override: list[str]
    """Layers that are quantized otherwise at load: PATTERN=NAME ('*.down_proj=int8'), with
    patterns like those of quantization_skip."""
    quantization_group_size: int | None
    """Inputs that share a scale where weights are quantized at load in groups, as int4's are."""
    block_size: int
    """Tokens per block of the KV cache."""
    kv_cache_memory: str
    """Memory of the KV cache: bytes ('2GiB') or a fraction ('0.5') of the memory that a full
    step leaves free. auto: nearly all of a GPU, part of a host."""
    kv_cache_dtype: Literal["auto", "model", "int8", "fp8"]
    """Type of cached keys and values. auto: the checkpoint's; model: the model's dtype; int8,
    fp8: quantized, with a scale per token and head unless the checkpoint has some."""
    kv_cache_dtype_skip_layers: list[str]
    """Layers that `kv_cache_dtype` leaves as they are: numbers ('0'), or patterns of names
    ('*.self_attn.attn')."""
    num_kv_blocks: int | None
    """Blocks of the KV cache, in place of an amount of memory. With several pools: blocks of the
    pool that long sequences fill first."""
    enable_prefix_caching: bool | None
    """Prefix caching: reuse the KV cache of earlier requests with the same prefix."""
    encoder_cache_memory: str
    """Memory for embeddings of images and other media, until prompts have been computed: bytes
    ('256MiB')."""
    feature_cache_memory: str
    """Memory for processed images and other media: a repeated item is not processed again. 0:
    none."""
    swap_memory: str | None
    """Host memory for swapped requests: bytes ('4GiB') or a fraction of the free memory."""
    max_num_seqs: int
    """Maximum number of sequences in a step."""
    max_num_batched_tokens: int | None
    """Token budget of a step, over all sequences."""
    enable_chunked_prefill: bool | None
    """Chunked prefill: compute long prompts in several steps."""
    scheduling_policy: str | None
    """Order of admission, by name. fcfs: by arrival. fair: by turns between clients. priority:
    by the request's number, smallest first. Or a plugin's."""
    step_time_target: float | None
    """Seconds that a step may take under the policy fair."""
    drafter: list[str] | None
    """Speculative decoding: drafters, by name. Of several, a step takes the drafts of the best."""
    draft_budget: Literal["auto", "all"]
    """Drafts that a step verifies. auto: as many as give the most tokens per second, by measured
    times of steps and acceptance. all: every draft."""
    preemption_mode: Literal["auto", "recompute", "swap"]
    """Preemption of a request. recompute: compute it again later. swap: move it to swap_memory.
    auto: the cheaper of the two."""
    engine_process: bool | None
    """Run the engine in a process of its own."""
    overlap: bool | None
    """Plan the next step while one is running. Results are the same."""
    start_timeout: float
    """Seconds that an engine process may take to load the model and warm up."""
    step_timeout: float
    """Seconds without progress after which the engine counts as stalled."""
    restart_engine: int
    """Maximum number of restarts of an engine process that has died."""
    tensor_parallel_size: int
    """Tensor-parallel ranks, which share each layer."""
    pipeline_parallel_size: int
    """Pipeline-parallel ranks, each with a part of the layers."""
    enable_expert_parallel: bool
    """Expert parallelism: divide the experts of a layer over the tensor-parallel ranks, instead
    of sharding each expert."""
    data_parallel_size: int
    """Engines with a copy of the model each, which share the requests."""
    nodes: int
    """Machines that share the ranks. All but the first run `toolkit worker`."""
    executor: str
    """Executor, by name: how the engine reaches its workers. auto: the first that supports the
    number of workers."""
    node_rank: int
    """Number of this machine. 0 holds the engine."""
    master: str | None
    """HOST:PORT at which the other nodes reach node 0."""
    launch_key_file: str | None
    """File with a secret, the same on all nodes. Nodes must prove that they know it."""
    node_timeout: float
    """Seconds without a sign of life after which another machine counts as lost."""
    device: str
    """Torch device: cpu, cuda, cuda:1, ... auto: cuda if there is one, else cpu."""
    kernels: str
    """Kernels of layers, by name. torch: plain torch. auto: the best for the device."""
    optimization_level: int
    """Compilation of the forward pass. 0: none. 1: for any number of tokens. 2: also for each of
    compile_sizes. 3: with tuning of these."""
    compilation_config: str | Mapping[str, Any]
    """Details of compilation, as JSON or a mapping: '{"compile_sizes": [1, 8]}'."""
    compile_cache: bool
    """Cache compiled code for the next start."""
    attention_backend: str
    """Attention backend by name, or names by kind of layer: decoder=A,window=B,encoder=C. auto:
    the best that can run each layer."""
    renderer: str
    """Renderer, by name. auto: the model's, else the first that can read the checkpoint."""
    tokenizer: str | None
    """Folder or hub id of the tokenizer."""
    chat_template: str | None
    """Jinja chat template, or a file with one."""
    renderer_url: list[str]
    """Render servers (toolkit render), such as http://127.0.0.1:8001, that render in place of
    this process."""
    limit_mm_per_prompt: list[str]
    """Maximum number of items in a prompt, by modality: image=8. Other modalities: 16."""
    allowed_media_hosts: list[str]
    """Hosts that media is fetched from: NAME or NAME:PORT."""
    max_media_bytes: int
    """Maximum size of an image or other item of media, as a file."""
    max_media_pixels: int
    """Maximum number of pixels of an image, or of a video's frames."""
    max_media_frames: int
    """Maximum number of frames sampled from a video."""
    max_audio_seconds: float
    """Maximum length of a recording, in seconds."""
    pooling_type: Literal[
        "auto",
        "CLS",
        "LAST",
        "MEAN",
        "MAX",
        "WEIGHTED_MEAN",
        "MEAN_SQRT_LEN",
        "ALL",
        "STEP",
    ]
    """Pooling method: how the tokens' vectors become one. ALL and STEP, for reward models, keep
    one per token or step."""
    normalize: bool | None
    """Scale embeddings to length 1 (L2), unless a request says otherwise."""
    matryoshka: bool | None
    """Requests may ask for the first dimensions of embeddings. Unset: if the checkpoint supports
    it."""
    use_activation: bool | None
    """Apply sigmoid or softmax to the logits of classes and scores, unless a request says
    otherwise."""
    step_tag_id: int | None
    """Process reward models: token that ends a step."""
    returned_token_ids: list[int] | None
    """Reward models: which logits are returned."""
    classifier_method: Literal["auto", "from_2_way_softmax", "no_post_processing"]
    """Classifier made from rows of the language-modeling head, if the checkpoint has none.
    from_2_way_softmax: the difference of two rows. no_post_processing: unchanged rows. auto: as
    the architecture's known reranker does."""
    classifier_tokens: list[str] | None
    """Words, one token each, whose rows of the head form the classifier. With two words, the
    first is 'no'."""
    score_template: str | None
    """Score template, by name or file: how a reranker reads a query and a document."""
    logit_mean: float | None
    """Number subtracted from logits."""
    logit_sigma: float | None
    """Number that logits are divided by, after logit_mean."""
    max_n: int
    """Maximum number of sequences per request (n)."""
    max_logprobs: int
    """Maximum number of log probabilities per token (logprobs, prompt_logprobs)."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
    """Values returned as log probabilities. raw: of the model's own distribution. processed: of
    the distribution that tokens are drawn from. logits: without softmax."""
    max_queued_requests: int | None
    """Maximum number of waiting requests."""
    max_queued_tokens: int | None
    """Maximum number of prompt tokens of waiting requests."""
    disable_plugins: list[str]
    """Plugins not to load."""
    plugin_option: dict[str, dict[str, Any]]
    """Options of plugins: NAME.KEY=VALUE as a flag, a mapping in the file."""

class VllmOptions(LLMOptions, total=False):
    """Options of an engine, of which `VllmConfig.make(...)` makes a config."""

    model: str
    """Model folder in Hugging Face layout, hub id, or file or name that a plugin knows ('tiny')."""
    plugins: list[str] | None
    """Plugins to load, and no others. If one of them fails, the start fails."""
