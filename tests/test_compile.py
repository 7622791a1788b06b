"""A model's forward pass is one graph: attention is an op that a compiler does not look into."""

from __future__ import annotations

import pytest
import torch
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_devkit import hidden_states, load_checkpoint


@pytest.mark.parametrize("kernels", ["torch", "cpu"])
def test_a_llama_compiles_without_a_graph_break(make_llama, kernels):
    folder, _ = make_llama("compiled")
    model = load_checkpoint(LlamaForCausalLM, folder, kernels=kernels)
    sequences = [torch.arange(3, 12), torch.arange(20, 25)]
    expected = hidden_states([model], sequences)
    graphs = []

    def look(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=look)
    ours = hidden_states([compiled], sequences)
    torch.compiler.reset()
    for one, other in zip(ours, expected, strict=True):
        # Norms and rotations are plain torch in a graph, whatever the kernels.
        assert (
            torch.equal(one, other) if kernels == "torch" else torch.allclose(one, other, atol=1e-5)
        )
    [graph] = graphs
    calls = [node for node in graph.graph.nodes if "toolkit_lm.attention" in str(node.target)]
    assert len(calls) == model.vllm_config.hf_config["num_hidden_layers"]
