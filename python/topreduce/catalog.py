"""The catalog of methods and stages, read from the C++ core: there is no second list."""

from __future__ import annotations

from typing import Any

from topreduce import _core

Item = dict[str, Any]


def stage(kind: str, name: str) -> Item:
    """The stage `name` of kind "feedback", "select" or "exchange"."""
    return next(item for item in _core.catalog()[kind] if item["name"] == name)


def methods() -> list[Item]:
    """Every method: name, summary, paper, its stages and all settings that it takes."""
    catalog = _core.catalog()
    listed = []
    for method in catalog["methods"]:
        selects = {
            name
            for name in (method["select_model"], method["select_bucket"])
            if name
        }
        stages = [("feedback", method["feedback"]), ("exchange", method["exchange"])]
        stages += [("select", name) for name in sorted(selects)]
        settings = list(catalog["settings"])
        for kind, name in stages:
            settings += [setting | {"stage": kind} for setting in stage(kind, name)["settings"]]
        listed.append(method | {"settings": settings})
    return listed


def allowed(setting: Item) -> str:
    """The values that a setting may take, in words."""
    if setting["kind"] == "choice":
        return str(setting["choices"]).replace("|", ", ")
    if setting["kind"] == "text":
        return "text"
    bracket = "(" if setting["above_low"] else "["
    return f"{bracket}{setting['low']:g}, {setting['high']:g}]"
