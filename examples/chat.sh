#!/bin/sh
# Upload a picture once, then ask about it by its id, with nothing but curl.
#
#     sh examples/chat.sh examples/picture.png
#
set -eu
url="${KEEPSIGHT_URL:-http://127.0.0.1:8000/v1}"
key="${KEEPSIGHT_KEY:-none}"
model="${KEEPSIGHT_MODEL:-demo}"

id=$(curl -sSf "$url/files" -H "Authorization: Bearer $key" \
  -F purpose=vision -F "file=@$1" | sed 's/.*"id":"\([^"]*\)".*/\1/')

curl -sSf "$url/chat/completions" \
  -H "Authorization: Bearer $key" -H "Content-Type: application/json" -d '{
    "model": "'"$model"'",
    "messages": [{"role": "user", "content": [
      {"type": "file", "file": {"file_id": "'"$id"'"}},
      {"type": "text", "text": "What is in the picture?"}
    ]}]
  }'
echo
