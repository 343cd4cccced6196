"""browser-use: its agent's model of a step, as a form that the answer has to have."""

from __future__ import annotations

import asyncio

from browser_use.agent.views import AgentOutput
from browser_use.llm import ChatOpenAI
from browser_use.llm.messages import (
    ContentPartImageParam,
    ContentPartTextParam,
    ImageURL,
    SystemMessage,
    UserMessage,
)
from browser_use.tools.service import Tools
from common import PICTURE, QUESTION, URL, check
from shape import Shape


async def main() -> None:
    model = ChatOpenAI(model="demo", base_url=URL, api_key="none", max_completion_tokens=400)
    parts = [
        ContentPartTextParam(text=QUESTION),
        ContentPartImageParam(image_url=ImageURL(url=PICTURE)),
    ]
    asked = [SystemMessage(content="You look at a screen."), UserMessage(content=parts)]
    told = await model.ainvoke(asked)
    check(told.completion, "an answer about a screenshot")
    shaped = await model.ainvoke(asked, output_format=Shape)
    check(isinstance(shaped.completion, Shape), "an answer in a form")
    actions = Tools().registry.create_action_model()
    step = AgentOutput.type_with_custom_actions_no_thinking(actions)
    found = await model.ainvoke(asked, output_format=step)
    check(isinstance(found.completion, step), "a step of the agent")


asyncio.run(main())
