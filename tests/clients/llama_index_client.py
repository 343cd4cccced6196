"""LlamaIndex: chat with pictures, streams, tools."""

from __future__ import annotations

import base64

from common import PICTURE, QUESTION, URL, check, look
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike


def asked() -> ChatMessage:
    image = ImageBlock(image=base64.b64decode(PICTURE.partition(",")[2]))
    return ChatMessage(role="user", blocks=[image, TextBlock(text=QUESTION)])


options = {"model": "demo", "api_base": URL, "api_key": "none", "max_retries": 0}
like = OpenAILike(
    **options,
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=12,
    context_window=2048,
)
first = like.chat([asked()])
check(first.raw.usage.prompt_tokens > 0, "usage")
like.chat([asked(), first.message, ChatMessage(role="user", content="And now?")])
check("".join(piece.delta or "" for piece in like.stream_chat([asked()])), "a stream")
tool = FunctionTool.from_defaults(look)
called = like.chat_with_tools([tool], user_msg=asked(), strict=True)
calls = like.get_tool_calls_from_response(called, error_on_no_tool_call=False)
if calls:
    told = ChatMessage(
        role="tool", content="A ring.", additional_kwargs={"tool_call_id": calls[0].tool_id}
    )
    like.chat_with_tools([tool], chat_history=[asked(), called.message, told])
check(True, "tools")
responses = OpenAIResponses(**options, max_output_tokens=12, context_window=2048)
first = responses.chat([asked()])
responses.chat([asked(), first.message, ChatMessage(role="user", content="And now?")])
check(True, "responses")
