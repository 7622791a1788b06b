"""Objects of a caller in this process, on their way to a render server."""

from __future__ import annotations

import io
from base64 import b64decode

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from toolkit_lm.errors import RequestError
from toolkit_lm_renderer_remote.media import (
    count_media,
    plain,
    plain_data,
    plain_messages,
    with_named,
)


def decoded(url: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(b64decode(url.partition(",")[2]))))


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3), (5, 7, 4), (3, 5, 7), (5, 7, 1)])
def test_pixels_arrive_as_they_are(shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    found = decoded(plain({"image": [pixels]})["image"][0])
    expected = np.moveaxis(pixels, 0, -1) if shape[0] == 3 else pixels
    assert (found == expected.reshape(found.shape)).all()


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "CMYK"])
def test_images_of_pillow_arrive_as_rgb(mode):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)).convert(
        mode
    )
    assert (decoded(plain(image)) == np.asarray(image.convert("RGB"))).all()


def test_embeddings_are_arrays_in_json():
    found = plain(
        {"embeds": torch.ones(2, 3, dtype=torch.bfloat16), "grid": np.array([[1, 2, 3]], np.int16)}
    )
    assert (found["embeds"]["dtype"], found["embeds"]["shape"]) == ("float32", [2, 3])
    assert np.frombuffer(b64decode(found["grid"]["data"]), np.int64).tolist() == [1, 2, 3]


def test_the_rest_stays():
    message = {
        "role": "user",
        "content": [
            {"type": "text", "text": "a"},
            {"type": "image", "image": b"abc"},
            5,
            None,
            True,
        ],
    }
    found = plain([message])
    assert found[0]["content"][1]["image"] == "data:application/octet-stream;base64,YWJj"
    assert found[0]["content"][2:] == [5, None, True]
    assert count_media([message]) == (1, 1)
    assert count_media(
        [
            {"content": "a"},
            {"content": None},
            5,
            {"content": [5, {"text": "a"}, {"type": "image_url"}]},
        ]
    ) == (1, 1)


def test_parts_of_unknown_types_may_be_items():
    parts = [
        {"type": "image_embeds"},
        {"type": "input_audio"},
        {"type": "video_url"},
        {"type": "file"},
        {"type": []},
        {"type": "refusal"},
    ]
    assert count_media([{"content": parts}]) == (4, 5)


@pytest.mark.parametrize(
    "given",
    [object(), {1, 2}, np.array(["a"]), np.zeros((0, 3), np.uint8), np.zeros((2, 2, 2), np.uint8)],
)
def test_what_cannot_be_sent_is_refused(given):
    with pytest.raises(RequestError):
        plain({"image": given})


FRAMES = np.zeros((2, 4, 4, 3), np.uint8)


@pytest.mark.parametrize(
    "frames",
    [
        FRAMES,
        torch.from_numpy(FRAMES),
        list(FRAMES),
        [Image.fromarray(one) for one in FRAMES],
        (FRAMES, {"fps": 2}),
    ],
    ids=["array", "tensor", "arrays", "images", "with fps"],
)
def test_frames_are_refused_by_their_number(frames):
    with pytest.raises(RequestError, match=r"^video 2: frames are not sent to a render server"):
        plain_messages(
            [
                {
                    "content": [
                        {"type": "video", "video": b"a"},
                        {"type": "image", "image": b"a"},
                        {"type": "video", "video": frames},
                    ]
                }
            ]
        )
    with pytest.raises(RequestError, match=r"^video 1: frames"):
        plain_data({"video": frames})


def test_what_cannot_be_sent_is_named():
    with pytest.raises(RequestError, match=r"^image 2: an array must be uint8"):
        plain_data({"image": [b"a", FRAMES]})
    with pytest.raises(RequestError, match=r"^image 2: a object cannot be sent"):
        plain_messages(
            [
                {"content": [{"type": "image", "image": b"a"}]},
                {"content": ["b", {"type": "image", "image": object()}]},
            ]
        )


SAMPLES = np.sin(np.arange(1600, dtype=np.float32))


def heard(sent):
    """The samples of a WAV that is sent, and how many there are in a second."""
    assert sent.startswith("data:audio/wav;base64,")
    return soundfile.read(io.BytesIO(b64decode(sent.partition(",")[2])), dtype="float32")


def test_samples_are_sent_as_a_wav():
    whole = (SAMPLES * 32767).astype(np.int16)
    for samples, expected in (
        (SAMPLES, SAMPLES),
        (torch.from_numpy(SAMPLES), SAMPLES),
        (whole, whole.astype(np.float32) / 32767),
    ):
        for sent in (
            plain_data({"audio": (samples, 16000)})["audio"],
            *plain_data({"audio": [(samples, 16000.0), b"a"]})["audio"][:1],
        ):
            found, rate = heard(sent)
            assert rate == 16000
            assert np.array_equal(found, expected)
    [message] = plain_messages([{"content": [{"type": "audio", "audio": (SAMPLES, 8000)}]}])
    assert heard(message["content"][0]["audio"])[1] == 8000


@pytest.mark.parametrize(
    "given",
    [
        SAMPLES,
        torch.from_numpy(SAMPLES),
        (SAMPLES[None], 16000),
        (SAMPLES, 0),
        (SAMPLES, float("nan")),
        ([0.5], 16000),
        (b"a", 5),
    ],
)
def test_samples_that_cannot_be_sent_are_named(given):
    with pytest.raises(RequestError, match=r"^audio 2: (samples are sent|it must be samples)"):
        plain_data({"audio": [b"a", given]})
    with pytest.raises(RequestError, match=r"^audio 2: (samples are sent|it must be samples)"):
        plain_messages(
            [
                {
                    "content": [
                        {"type": "input_audio", "input_audio": {"data": "YQ=="}},
                        {"type": "audio", "audio": given},
                    ]
                }
            ]
        )


def test_what_an_audio_encoder_gives_is_sent():
    assert plain_data({"audio": [np.zeros((3, 2), np.float32)]})["audio"][0]["shape"] == [3, 2]


def test_files_are_sent_as_they_are():
    assert plain_data({"video": [b"a", "data:,"], "image": b"a"}) == {
        "video": [plain(b"a"), "data:,"],
        "image": plain(b"a"),
    }
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:,"}},
                {"type": "file", "file": {"file_data": "b"}},
            ],
        }
    ]
    assert plain_messages(messages) == messages


def test_items_given_by_uuid_alone_have_places():
    data = {"image": [b"abc", None], "audio": None}
    uuids = {"image": ["a", "b"], "audio": "c", "video": ["d", "e"], "other": None}
    found = with_named(data, uuids)
    assert found == {"image": [b"abc", None], "audio": [None], "video": [None, None]}
    assert plain_data(found)["image"][1] is None and plain_data(found)["video"] == [None, None]
