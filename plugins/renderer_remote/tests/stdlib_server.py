"""A render server of the standard library alone: tokens are bytes, and pictures are netpbm files
(P6) of up to 16 x 16 pixels."""

import base64
import hashlib
import json
import re
import struct
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LONGEST = 4096
IMAGE = 256
VOCABULARY = 257


class RefusedError(Exception):
    def __init__(self, message, param=None, code=None):
        super().__init__(message)
        self.detail = {"message": message, "param": param, "code": code}


def check(holds, message, param=None, code=None):
    if not holds:
        raise RefusedError(message, param, code)


def picture(source, number):
    """The feature of one picture, without its place, and how many tokens stand for it."""
    check(
        isinstance(source, str) and source.startswith("data:"),
        f"image {number}: it is no data URL.",
        "messages",
    )
    data = base64.b64decode(source.partition(",")[2])
    found = re.match(rb"P6\s(\d{1,2})\s(\d{1,2})\s255\s", data)
    check(found, f"image {number}: it is no netpbm file.", "messages")
    width = int(found[1])
    height = int(found[2])
    pixels = data[found.end() :]
    fits = 0 < width <= 16 and 0 < height <= 16 and len(pixels) == width * height * 3
    check(fits, f"image {number}: it has not the size that it states.", "messages")
    values = struct.pack(f"<{len(pixels)}f", *(one / 255 for one in pixels))
    array = {
        "dtype": "float32",
        "shape": [height, width, 3],
        "data": base64.b64encode(values).decode(),
    }
    identifier = hashlib.sha256(b"stdlib-1 %d %d " % (width, height) + pixels).hexdigest()
    feature = {
        "modality": "image",
        "mm_identifier": identifier,
        "data": {"pixel_values": array},
        "layout": {"size": [height, width]},
    }
    return feature, width * height


def rendered(pieces, body):
    """A prompt of texts, token ids and pictures."""
    token_ids = []
    features = []
    for piece in pieces:
        if isinstance(piece, str):
            token_ids += piece.encode()
        elif isinstance(piece, list):
            token_ids += piece
        else:
            feature, length = picture(piece["url"], len(features) + 1)
            if feature["mm_identifier"] in body.get("held", []):
                feature["data"] = None
            features.append(
                feature
                | {"mm_position": {"offset": len(token_ids), "length": length, "mask": None}}
            )
            token_ids += [IMAGE] * length
    check(token_ids, "the prompt is empty.", "prompt")
    check_tokens(token_ids, "prompt")
    too_long = body.get("check_length", True) and len(token_ids) >= LONGEST
    check(
        not too_long,
        f"the prompt has {len(token_ids)} tokens.",
        "prompt",
        "context_length_exceeded",
    )
    return {"token_ids": token_ids, "features": features or None, "max_model_len": LONGEST}


def check_tokens(token_ids, param):
    known = isinstance(token_ids, list) and all(
        isinstance(one, int) and 0 <= one < VOCABULARY for one in token_ids
    )
    check(known, "that is no list of tokens of the vocabulary.", param)


def chat(body):
    messages = body.get("messages")
    check(
        isinstance(messages, list) and messages,
        "messages must be a list that is not empty.",
        "messages",
    )
    pieces = []
    for message in messages:
        check(
            isinstance(message, dict) and isinstance(message.get("role"), str),
            "a message needs a role.",
            "messages",
        )
        content = message.get("content")
        pieces.append(f"{message['role']}: ")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        pieces += [
            part["text"] if part["type"] == "text" else {"url": part["image_url"]["url"]}
            for part in parts
        ]
        pieces.append("\n")
    return rendered([*pieces, "assistant: "], body)


def prompts(body):
    given = body.get("prompt")
    check(given is not None, "a prompt is missing.", "prompt")
    many = (
        given if isinstance(given, list) and not (given and isinstance(given[0], int)) else [given]
    )
    return {"data": [prompt(one, body) for one in many]}


def prompt(given, body):
    images = (body.get("multi_modal_data") or {}).get("image", [])
    if isinstance(given, list):
        return rendered([given], body)
    check(isinstance(given, str), "a prompt must be a text or a list of tokens.", "prompt")
    texts = given.split("<image>") if images else [given]
    check(
        len(texts) == len(images) + 1 or not images,
        f"{len(texts) - 1} placeholders for {len(images)} images.",
        "prompt",
    )
    between = [[{"url": image}, text] for image, text in zip(images, texts[1:], strict=True)]
    return rendered([texts[0], *(piece for pair in between for piece in pair)], body)


def tokenize(body):
    check(isinstance(body.get("prompt"), str), "prompt must be a text.", "prompt")
    return {"tokens": list(body["prompt"].encode())}


def derender(body):
    check_tokens(body.get("token_ids"), "token_ids")
    return {
        "text": bytes(one for one in body["token_ids"] if one != IMAGE).decode(errors="replace")
    }


ROUTES = {
    "/v1/chat/completions/render": chat,
    "/v1/completions/render": prompts,
    "/tokenize": tokenize,
    "/derender": derender,
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            check(self.path in ROUTES, "there is no such route.")
            status = 200
            answer = ROUTES[self.path](json.loads(data))
        except RefusedError as refused:
            status = 400
            answer = {"error": refused.detail}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            status = 400
            answer = {
                "error": {
                    "message": f"the request cannot be read: {error!r}",
                    "param": None,
                    "code": None,
                }
            }
        answer = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True


if __name__ == "__main__":
    with Server(("127.0.0.1", 0), Handler) as server:
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()
