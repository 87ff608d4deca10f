"""Dispatches of normal mode that make a new routing, in a group that is large enough."""

from __future__ import annotations

import gc
from typing import Any, Optional

import torch

import epd
from epd.torch.staging import Staging

from .given import Given
from .groups import Groups, Joined
from .growth import MOST, Size, asked_by, choice_for
from .streams import Call, Streams

SLOT = 0


class NewDispatch:
    """The submission of a dispatch of a new routing. given None: rows that nobody reads."""

    __slots__ = ("collected", "num_tokens", "options")

    def __init__(
        self, given: Optional[Given], num_tokens: int, call: Call, sms: int, omit_weights: bool, staging: Staging
    ) -> None:
        self.num_tokens = num_tokens
        self.collected = False  # garbage, for a free handle
        self.options: dict[str, Any] = {
            "stream": call.stream,
            "omit_weights": omit_weights,
            "keep_handle": True,
            "sms": sms,
            "row_format": 0 if given is None else given.row_format,
            "memory": staging,
        }


class Dispatches:
    """The dispatches of a Buffer."""

    def __init__(self, groups: Groups, streams: Streams) -> None:
        self._groups = groups
        self._streams = streams

    def unheard(self, joined: Joined, new: NewDispatch) -> epd.Dispatch:
        """A dispatch for which no rank waits."""
        ticket = self._submit(joined, new)
        if ticket is None:
            raise _no_handle(joined)
        return ticket

    def heard(self, joined: Joined, new: NewDispatch) -> tuple[Joined, epd.Dispatch, epd.Counts]:
        """A dispatch for whose counts all ranks wait. If the group is too small on any rank, in a larger one."""
        while True:
            try:
                ticket = self._submit_or_ask(joined, new)
                return joined, ticket, ticket.counts()
            except epd.InvalidArgument as error:
                asked = asked_by(error)
                if asked is None or joined.size.covers(asked.size):
                    raise
            joined = self._groups.larger(joined, asked, self._streams)

    def _submit_or_ask(self, joined: Joined, new: NewDispatch) -> epd.Dispatch:
        size = joined.size.for_tokens(new.num_tokens)
        if size == joined.size:
            ticket = self._submit(joined, new)
            if ticket is not None:
                return ticket
            size = Size(size.tokens, 2 * size.handles)
        if not MOST.covers(size):
            raise _no_handle(joined)
        return self._ask(joined, new, size)

    def _ask(self, joined: Joined, new: NewDispatch, size: Size) -> epd.Dispatch:
        """Asks all ranks for a group of this size, by a dispatch that fails."""
        staging = Staging()
        choices = (choice_for(size), *[-1] * (joined.shape.topk - 1))
        staging.give(epd.Region.TOPK_IDX, torch.tensor([choices], dtype=torch.int64, device=self._groups.device))
        options = {**new.options, "omit_weights": True, "memory": staging, "keep_handle": False}
        return joined.submit(joined.group.dispatch, SLOT, 1, **options)

    def _submit(self, joined: Joined, new: NewDispatch) -> Optional[epd.Dispatch]:
        """None: no handle is free, also when those in cycles were collected."""
        joined.captured = joined.captured or self._streams.capturing
        try:
            return joined.submit(joined.group.dispatch, SLOT, new.num_tokens, **new.options)
        except epd.ResourceExhausted as error:
            if "num_handles" not in str(error):
                raise
        if new.collected or self._streams.capturing:
            return None
        new.collected = True
        gc.collect()
        return self._submit(joined, new)


def _no_handle(joined: Joined) -> epd.Error:
    most = joined.size.handles
    text = f"{most} handles of {joined.shape} are alive; allowed: {most} in graphs and with num_worst_tokens"
    return epd.ResourceExhausted(f"{text}, and {MOST.handles} elsewhere")
