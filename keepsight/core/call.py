"""The options of one call, sorted by consumer; unknown options are refused.

Each call comes here first, so that no option is accepted and then ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keepsight.core.decoding.sampling import known_options
from keepsight.core.settings import tenant_name
from keepsight.errors import InputError, UnknownOption
from keepsight.kinds import Answering, Asking, Options

CHAT_OPTIONS = ("tenant", "tools", "template_kwargs")


@dataclass
class Call:
    """One call that renders messages."""

    tenant: str
    template: Options
    decoding: Options

    @classmethod
    def of(cls, options: Options, tenant: str, where: str = "chat") -> Call:
        """The options of a call that answers. `tenant` applies if the options name none."""
        if "stream" in options:
            raise UnknownOption(
                f"{where} has no option 'stream'; vlm.stream(messages), or the stream(...) of a "
                "session, yields the pieces of an answer"
            )
        known = [*known_options(), *CHAT_OPTIONS]
        own = (Asking if where in ("ask", "edit") else Answering).__annotations__
        UnknownOption.refuse(options, known, where, own)
        options = dict(options)
        asked = options.pop("tenant", None)
        template = options.pop("template_kwargs", None) or {}
        if not isinstance(template, Mapping):
            raise InputError(f"template_kwargs is a {type(template).__name__}, expected a record")
        template = dict(template)
        if (tools := options.pop("tools", None)) is not None:
            template["tools"] = tools
        whose = tenant if asked is None else tenant_name(asked)
        return cls(whose, template, options)

    @classmethod
    def before_decoding(cls, options: Options, tenant: str, where: str) -> Call:
        """The options of a call that decodes nothing; options of decoding are refused."""
        UnknownOption.refuse(options, CHAT_OPTIONS, where)
        return cls.of(options, tenant, where)
