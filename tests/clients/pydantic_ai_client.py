"""pydantic-ai: strict tools by itself; chat and responses."""

from __future__ import annotations

import asyncio
import base64

from common import PICTURE, QUESTION, URL, check, look
from pydantic_ai import Agent, BinaryContent, NativeOutput, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from shape import Shape

provider = OpenAIProvider(base_url=URL, api_key="none")
picture = BinaryContent(base64.b64decode(PICTURE.partition(",")[2]), media_type="image/png")


async def main() -> None:
    limits = UsageLimits(request_limit=6)
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("demo", provider=provider)
        settings = {"max_tokens": 12, "parallel_tool_calls": True}
        agent = Agent(model, instructions="Answer.", tools=[look], model_settings=settings)
        first = await agent.run([QUESTION, picture], usage_limits=limits)
        check(first.usage.input_tokens > 0, f"{kind.__name__}: usage")
        again = await agent.run(
            "And now?", message_history=first.all_messages(), usage_limits=limits
        )
        check(again.usage.cache_read_tokens > 0, f"{kind.__name__}: cached tokens")
        async with agent.run_stream([QUESTION, picture], usage_limits=limits) as stream:
            async for _ in stream.stream_output():
                pass
        check(stream.usage.output_tokens > 0, f"{kind.__name__}: usage of a stream")
        settings = {"max_tokens": 200, "parallel_tool_calls": False}
        for output in (Shape, NativeOutput(Shape)):
            agent = Agent(model, output_type=output, model_settings=settings)
            found = await agent.run([QUESTION, picture], usage_limits=limits)
            check(isinstance(found.output, Shape), f"{kind.__name__}: {type(output).__name__}")


asyncio.run(main())
