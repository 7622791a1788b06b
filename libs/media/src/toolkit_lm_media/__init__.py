"""Images, videos and recordings that clients send.

`source.load_bytes` gets the bytes, `image.open_image` the pixels, `video.open_video` the frames,
`audio.open_audio` the samples.

Each bound is checked before the work.
"""

from __future__ import annotations
