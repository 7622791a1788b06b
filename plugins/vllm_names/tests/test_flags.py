"""vLLM's flags on the command line, and `toolkit migrate-vllm`."""

from __future__ import annotations

import pytest
from toolkit_lm.errors import ConfigError
from toolkit_lm_cli import run
from toolkit_lm_vllm_names.flags import translate_flags
from toolkit_lm_vllm_names.migrate import migrate

KNOWN = ["--port", "--max-model-len", "--served-model-name", "--dtype", "--enable-prefix-caching"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tiny --port 1 --gpu-memory-utilization 0.5", "tiny --port 1 --kv-cache-memory 0.5"),
        ("--enforce-eager tiny --gpu-memory-utilization=0.5", "tiny --kv-cache-memory 0.5"),
        (
            "tiny -tp 2 --num-gpu-blocks-override 8 -O3",
            "tiny --tensor-parallel-size 2 --num-kv-blocks 8 --optimization-level 3",
        ),
        ("tiny --dtype half --max-model-len 4k", "tiny --dtype float16 --max-model-len 4000"),
        (
            "tiny --no-enable-prefix-caching --served-model-name a",
            "tiny --no-enable-prefix-caching --served-model-name a",
        ),
        ("tiny --async-scheduling --no-enforce-eager", "tiny --overlap"),
        ("tiny --disable-log-stats --nobody-has-it 1", "tiny --nobody-has-it 1"),
        ("tiny --enable-lora false --skip-tokenizer-init true", "tiny --renderer tokens"),
        (
            "tiny --enable-lora --lora-modules a=x b=y --max-loras 2",
            'tiny --plugin-option lora.enabled=True --plugin-option lora.modules=["a=x","b=y"] '
            "--plugin-option lora.max_adapters=2",
        ),
        (
            "tiny --guided-decoding-backend guidance -O3",
            "tiny --plugin-option structured_output.backend=llguidance --optimization-level 3",
        ),
        ("tiny -- --enforce-eager", "tiny -- --enforce-eager"),
        ("tiny -cc 3 --port 1", "tiny --port 1 --optimization-level 2"),
        ("tiny -O3 --enforce-eager", "tiny --optimization-level 0"),
        ("tiny --distributed-executor-backend ray", "tiny --executor ray"),
    ],
)
def test_flags(words, expected):
    assert translate_flags(words.split(), KNOWN) == expected.split()


def test_flags_of_compilation_count_together():
    words = ["tiny", "-O.mode=3", "-O.full_cuda_graph=true", "--cudagraph-capture-sizes", "1", "2"]
    stated = '{"cudagraph_mode": "full", "cudagraph_capture_sizes": [1, 2]}'
    assert translate_flags(words, KNOWN) == [
        "tiny",
        "--optimization-level",
        "2",
        "--compilation-config",
        stated,
    ]
    assert (
        migrate(f"vllm serve {' '.join(words)}").line
        == f"toolkit serve tiny --optimization-level 2 --compilation-config '{stated}'"
    )


def test_a_commands_own_flag_means_what_the_command_says():
    """`toolkit embed --task` does not mean vLLM's runner type."""
    assert translate_flags(["--task", "classify"], {"--task"}) == ["--task", "classify"]


def test_a_flag_without_its_value_is_left_to_the_parser():
    assert translate_flags(["--swap-space"], KNOWN) == []
    with pytest.raises(ConfigError, match="'enable_prompt_adapter' cannot be True here"):
        translate_flags(["tiny", "--enable-prompt-adapter"], KNOWN)


def test_the_command_line_takes_them(capsys):
    words = [
        "explain",
        "tiny",
        "--gpu-memory-utilization",
        "0.5",
        "--enforce-eager",
        "--dtype",
        "float",
        "--swap-space",
        "0",
    ]
    assert run([*words, "--json"]) == 0, capsys.readouterr().err
    assert '"float32"' in capsys.readouterr().out
    assert run(["explain", "tiny", "--enable-prompt-adapter"]) == 2
    assert "are chosen by requests" in capsys.readouterr().err


def test_a_file_of_options_may_have_them(tmp_path, capsys):
    file = tmp_path / "options.yaml"
    file.write_text("gpu-memory-utilization: 0.5\nenforce_eager: true\ndtype: float\nport: 8001\n")
    assert run(["explain", "tiny", "--config", str(file), "--json"]) == 0, capsys.readouterr().err
    assert '"float32"' in capsys.readouterr().out
    file.write_text("enable_prompt_adapter: true\n")
    assert run(["explain", "tiny", "--config", str(file)]) == 2
    assert "are chosen by requests" in capsys.readouterr().err


class TestMigration:
    def test_a_line(self):
        found = migrate(
            "vllm serve org/model --port 8001 -tp 2 --gpu-memory-utilization 0.8 --enforce-eager "
            "--enable-prompt-adapter --max-model-len 32k "
            "--served-model-name a b --dtype half --limit-mm-per-prompt '{\"image\": 2}' "
            "--swap-space 0 --no-enable-prefix-caching"
        )
        assert found.line == (
            "toolkit serve org/model --port 8001 --tensor-parallel-size 2 --kv-cache-memory 0.8 "
            "--max-model-len 32000 "
            "--served-model-name a --served-model-name b --dtype float16 --limit-mm-per-prompt "
            "image=2 --no-enable-prefix-caching"
        )
        assert [row.partition(":")[0] for row in found.left_out] == ["--enable-prompt-adapter"]
        assert [row.partition(":")[0] for row in found.needless] == [
            "--enforce-eager",
            "--swap-space 0",
        ]

    def test_other_forms(self):
        line = (
            "VLLM_USE_V1=1 python3 -m vllm.entrypoints.openai.api_server --model org/model "
            "--disable-log-requests"
        )
        assert migrate(line).line == "toolkit serve org/model"
        assert migrate("vllm serve --config a.yaml m").line == "toolkit serve m --config a.yaml"
        assert migrate("vllm serve 'a b'").line == "toolkit serve 'a b'"

    def test_what_vllm_does_not_have_is_told(self):
        [row] = migrate("vllm serve m --max-model-length 3").left_out[:1]
        assert "vLLM has no such flag" in row and "--max-model-len" in row

    @pytest.mark.parametrize("line", ["", "sglang serve m", "vllm bench", "vllm serve 'm"])
    def test_other_lines_are_refused(self, line):
        with pytest.raises(ConfigError):
            migrate(line)

    def test_the_command(self, capsys):
        assert run(["migrate-vllm", "vllm serve tiny --enable-prompt-adapter --enforce-eager"]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(
            "toolkit serve tiny\n\nWithout an equivalent:\n  --enable-prompt-adapter: "
        )
        assert "Not needed:\n  --enforce-eager: " in printed
        # Unquoted, after --.
        assert run(["migrate-vllm", "--", "vllm", "serve", "tiny", "--port", "3"]) == 0
        assert capsys.readouterr().out == "toolkit serve tiny --port 3\n"
