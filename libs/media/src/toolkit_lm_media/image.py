"""Pictures in memory, decoded from the bytes of a file."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from toolkit_lm_media import bmp, gif, jpeg, png, webp
from toolkit_lm_media.header import Header
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.modes import to_rgb
from toolkit_lm_media.orientation import metadata, turned
from toolkit_lm_media.refusal import RefusedError, named
from toolkit_lm_media.source import require_size

# The classes rather than Image.open: that one warns of large pictures, and warnings cannot be held
# back in one thread alone.
_DECODERS: dict[str, Callable[[io.BytesIO], ImageFile]] = {
    "BMP": BmpImageFile,
    "GIF": GifImageFile,
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
}


def open_image(
    data: bytes, limits: MediaLimits, *, label: str = "image", param: str | None = None
) -> npt.NDArray[np.uint8]:
    """The pixels of a PNG, JPEG, WEBP, BMP or GIF (its first frame): uint8 [height, width, 3], RGB,
    the right way up.

    Modes become RGB as `modes.to_rgb` says: transparency is dropped. `label` names the item in
    errors, such as "image 2". Raises RequestError for another format, a broken file, and a picture
    of no pixels or more than `limits.max_pixels`.
    """
    with named(label, param):
        require_size(data, limits)
        header = _read_header(data)
        _require_pixels(header, limits)
        return _decode(header)


def image_size(data: bytes) -> tuple[int, int] | None:
    """Width and height as the header of a picture has them, of a file or its beginning; None where
    it says nothing."""
    try:
        header = _read_header(data)
    except RefusedError:
        return None
    return header.width, header.height


def _read_header(data: bytes) -> Header:
    if data.startswith(png.MAGIC):
        return png.read(data)
    if data.startswith(jpeg.MAGIC):
        return jpeg.read(data)
    if webp.is_webp(data):
        return webp.read(data)
    if data.startswith(gif.MAGICS):
        return gif.read(data)
    if data.startswith(bmp.MAGIC):
        return bmp.read(data)
    raise RefusedError(
        f"it is not a picture of a known format; known: {', '.join(sorted(_DECODERS))}"
    )


def _require_pixels(header: Header, limits: MediaLimits) -> None:
    if header.width < 1 or header.height < 1:
        raise RefusedError("it has no pixels")
    if header.width * header.height > limits.max_pixels:
        raise RefusedError(
            f"it has {header.width} x {header.height} pixels, more than the {limits.max_pixels} "
            "that are taken"
        )


def _decode(header: Header) -> npt.NDArray[np.uint8]:
    try:
        with _DECODERS[header.format](io.BytesIO(header.body)) as image:
            if image.size == (header.width, header.height):
                return _pixels(image, header)
    except MemoryError:
        raise RefusedError("it does not fit in memory") from None
    # Decoders raise nearly anything for a broken file: SyntaxError, OSError, struct.error and
    # others.
    except Exception:
        raise RefusedError(f"it is a broken or truncated {header.format}") from None
    raise RefusedError(f"it is a {header.format} with two sizes")


def _pixels(image: ImageFile, header: Header) -> npt.NDArray[np.uint8]:
    image.load()
    exif, xmp = metadata(image.info)
    picture = turned(to_rgb(image), header.exif or exif, header.xmp or xmp)
    # A copy, because an array over Pillow's memory cannot be written to, and torch warns of that.
    return np.array(picture, dtype=np.uint8)
