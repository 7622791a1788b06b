"""Written by docs/generate_typed_options.py."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

APART: tuple[str, ...]

class LLMOptions(TypedDict, total=False):
    """Options of `LLM(...)`, beside its model and its plugins."""

    revision: str | None
    """Branch, tag or commit of a hub id."""
    served_model_name: list[str] | None
    """Model name in the HTTP API. Answers tell the first of several."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    """Precision of weights and activations. auto: the checkpoint's."""
    max_model_len: int | None
    """Maximum tokens of prompt plus output."""
    max_encoder_len: int | None
    """Maximum tokens of an encoder prompt."""
    generation_config: str
    """Sampling defaults: checkpoint, none, or a folder of generation_config.json."""
    seed: int | None
    """Seed of requests that have none."""
    trust_remote_code: bool
    """Run Python code that comes with the checkpoint."""
    runner: Literal["auto", "generate", "pooling"]
    """Runner type: what the engine is for. auto: as the checkpoint's architecture says."""
    convert: str
    """Pooling adapter that converts the model: none, embed, classify or a plugin's. auto: the
    one that the runner type needs."""
    extra_tasks: list[str]
    """Pooling tasks that a generating engine serves: embed."""
    model_impl: str
    """Model implementation: auto, or a fallback by name, such as 'transformers'. auto: the class
    registered for the architecture, else a fallback."""
    verify_fallback: bool
    """Compare a fallback's first logits with those of its model by itself, and refuse it where
    they differ."""
    load_format: str
    """Load format of the weights, by name. dummy: random numbers, for measurements. auto: the
    first that reads MODEL."""
    quantization: str
    """Quantization of the weights, by name: the checkpoint's, or one that is made at load. auto:
    the checkpoint's, or none."""
    block_size: int
    """Tokens per block of the KV cache."""
    kv_cache_memory: str
    """Memory of the KV cache: bytes ('2GiB') or a fraction ('0.5') of what a full step leaves.
    auto: what can be spared."""
    num_kv_blocks: int | None
    """Blocks of the KV cache, in place of an amount of memory. Of several pools: of the one that
    long sequences fill first."""
    enable_prefix_caching: bool | None
    """Prefix caching: reuse the KV cache of earlier requests that begin alike."""
    encoder_cache_memory: str
    """Memory for what encoders have made of images and other media, until prompts have been
    computed: bytes ('256MiB')."""
    feature_cache_memory: str
    """Memory for images and other media as encoders read them: one that comes again is not
    processed again. 0: none."""
    swap_memory: str | None
    """Host memory for swaps: bytes ('4GiB') or a fraction of the free."""
    max_num_seqs: int
    """Maximum number of sequences in a step."""
    max_num_batched_tokens: int | None
    """Token budget of a step, over all sequences."""
    enable_chunked_prefill: bool | None
    """Chunked prefill: compute long prompts in several steps."""
    scheduling_policy: str | None
    """Order of admission, by name. fcfs: by arrival. fair: by turns between clients. priority:
    by the request's number, smallest first. Or a plugin's."""
    drafter: str | None
    """Speculative decoding: the plugin that drafts tokens, by name."""
    preemption_mode: Literal["auto", "recompute", "swap"]
    """Preemption of a request. recompute: compute it again later. swap: move it to swap_memory.
    auto: what costs less."""
    engine_process: bool | None
    """Run the engine in a process of its own."""
    overlap: bool | None
    """Plan the next step while one is computed. Results are the same."""
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
    of cutting each one."""
    data_parallel_size: int
    """Engines with a copy of the model each, which share the requests."""
    nodes: int
    """Machines that share the ranks. All but the first run `toolkit worker`."""
    executor: str
    """Executor, by name: how the engine reaches its workers. auto: the first that runs so many."""
    node_rank: int
    """Number of this machine. 0 holds the engine."""
    master: str | None
    """HOST:PORT of node 0, where the other nodes reach it."""
    launch_key_file: str | None
    """File of a secret, the same on all nodes: they prove that they know it."""
    node_timeout: float
    """Seconds without a sign of life after which another machine counts as lost."""
    device: str
    """Torch device: cpu, cuda, cuda:1, ... auto: cuda where there is one, else cpu."""
    kernels: str
    """Kernels of layers, by name. torch: plain torch. auto: the best for the device."""
    optimization_level: int
    """Compilation of the forward pass. 0: none. 1: for any number of tokens. 2: for the
    compile_sizes, too. 3: those are tuned."""
    compilation_config: str | Mapping[str, Any]
    """Details of compilation, as JSON or a mapping: '{"compile_sizes": [1, 8]}'."""
    compile_cache: bool
    """Keep what is compiled for the next start."""
    attention_backend: str
    """Attention backend by name, or names by kind of layer: decoder=A,window=B,encoder=C. auto:
    for each layer the best that can run it."""
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
    """Maximum number of items of media in a prompt, by modality: image=8. What is not named: 16."""
    allowed_media_hosts: list[str]
    """Hosts that media is fetched from: NAME or NAME:PORT."""
    max_media_bytes: int
    """Maximum size of an image or other item of media, as a file."""
    max_media_pixels: int
    """Maximum number of pixels of an image, or of a video's frames."""
    max_media_frames: int
    """Maximum number of frames that are taken of a video."""
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
    """Pooling method: how the tokens' vectors become one. ALL and STEP, of reward models, keep
    one per token or step."""
    normalize: bool | None
    """Scale embeddings to length 1 (L2), unless a request says otherwise."""
    matryoshka: bool | None
    """Requests may ask for the first dimensions of embeddings. Unset: where the checkpoint says
    that its model is made for it."""
    use_activation: bool | None
    """Apply sigmoid or softmax to the logits of classes and scores, unless a request says
    otherwise."""
    step_tag_id: int | None
    """Process reward models: token that ends a step."""
    returned_token_ids: list[int] | None
    """Reward models: which logits are returned."""
    classifier_method: Literal["auto", "from_2_way_softmax", "no_post_processing"]
    """Classifier made of rows of the language-modeling head, where the checkpoint has none.
    from_2_way_softmax: the difference of two rows. no_post_processing: rows as they are. auto:
    as the architecture's known reranker does."""
    classifier_tokens: list[str] | None
    """Words, one token each, whose rows of the head make the classifier. Of two words, the first
    is 'no'."""
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
