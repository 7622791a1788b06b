"""`toolkit transcribe`: files to transcripts, and what is told of files that are none."""

import json
import wave

import numpy as np
from toolkit_lm_cli import run


def test_the_command(folder, tmp_path, capsys):
    recording = 0.4 * np.sin(2 * np.pi * 300 * np.arange(3 * 16000) / 16000)
    path = tmp_path / "speech.wav"
    short = tmp_path / "short.wav"
    for name, rate in ((path, 16000), (short, 16000)):
        with wave.open(str(name), "wb") as file:
            file.setparams((2, 2, rate, 0, "NONE", ""))
            file.writeframes(np.repeat((recording * 20000).astype("<i2"), 2).tobytes())
    (tmp_path / "text.wav").write_text("no sound")
    flags = [
        "--device",
        "cpu",
        "--num-kv-blocks",
        "1200",
        "--max-num-seqs",
        "4",
        "--language",
        "en",
    ]
    assert run(["transcribe", str(folder), str(path), str(short), "--format", "json", *flags]) == 0
    one, other = map(json.loads, capsys.readouterr().out.splitlines())
    assert (one["duration"], one["language"]) == (3.0, "en")
    assert one == other
    out = tmp_path / "out"
    assert (
        run(
            [
                "transcribe",
                str(folder),
                str(path),
                str(tmp_path / "text.wav"),
                "--format",
                "srt",
                "--out",
                str(out),
                *flags,
            ]
        )
        == 1
    )
    assert "text.wav: it is not a recording of a known format" in capsys.readouterr().err
    assert [one.name for one in out.iterdir()] == ["speech.srt"]
    assert run(["transcribe", str(folder), str(path), "--format", "pdf", *flags]) == 2
    other = tmp_path / "other" / "speech.flac"
    assert run(["transcribe", str(folder), str(path), str(other), "--out", str(out), *flags]) == 2
    assert f"'{path}' and '{other}' would have transcripts of one name" in capsys.readouterr().err
