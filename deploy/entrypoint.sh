#!/bin/sh
# The command of an image: `toolkit`, and a port that is open to others only where clients need a key.
set -eu

if [ "${1:-}" = healthcheck ]; then
    exec python -c '
import os, ssl, sys, urllib.request
secure = "TOOLKIT_LM_SSL_CERTFILE" in os.environ
# The certificate is for the names by which clients know the server.
context = ssl._create_unverified_context() if secure else None
url = "http%s://127.0.0.1:%s/health" % ("s" if secure else "", os.environ.get("TOOLKIT_LM_PORT", "8000"))
try:
    urllib.request.urlopen(url, timeout=3, context=context)
except OSError as error:
    sys.exit(f"{url}: {error}")
'
fi

case "${1:-}" in
serve | render)
    has_key="${TOOLKIT_LM_API_KEY:-}${TOOLKIT_LM_API_KEYS_FILE:-}"
    for word in "$@"; do
        case "$word" in --api-key | --api-key=* | --api-keys-file | --api-keys-file=*) has_key=yes ;; esac
    done
    if [ -n "$has_key" ]; then
        export TOOLKIT_LM_HOST="${TOOLKIT_LM_HOST:-0.0.0.0}"
    elif [ -z "${TOOLKIT_LM_HOST:-}" ]; then
        echo "error: without a key, everyone who reaches the port may use the model. Set TOOLKIT_LM_API_KEY, or" \
            "TOOLKIT_LM_API_KEYS_FILE; or TOOLKIT_LM_HOST, such as 0.0.0.0, to serve without one." >&2
        exit 2
    fi
    ;;
esac
exec toolkit "$@"
