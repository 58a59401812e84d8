"""The catalog of methods and stages, read from the C++ core: there is no second list."""

from typing import Any

from topreduce import _core

Item = dict[str, Any]


def methods() -> list[Item]:
    """Every method: name, summary, paper, its stages, and all settings that it takes.

    A setting that belongs to one stage only names it, as in ``"stage": "select=carried"``.
    Defaults are those of `Reducer`; where `attach` takes others, the meaning says so.
    """
    common = common_settings()
    return [
        method | {"settings": _with_density(common, method) + _stage_settings(method)}
        for method in _core.catalog()["methods"]
    ]


def common_settings() -> list[Item]:
    """The settings that every method takes."""
    return [_plain(setting) for setting in _core.catalog()["settings"]]


def stages(method: Item) -> list[tuple[str, Item]]:
    """The kind ("feedback", "select", "exchange") and the stage, in the order the data flows."""
    wanted = [
        ("feedback", method["feedback"]),
        *(("select", name) for name in selects(method)),
        ("exchange", method["exchange"]),
    ]
    catalog = _core.catalog()
    return [
        (kind, next(stage for stage in catalog[kind] if stage["name"] == name))
        for kind, name in wanted
    ]


def selects(method: Item) -> dict[str, str]:
    """Its select stages, and with which granularity each is used; none if ranks choose together."""
    used: dict[str, str] = {}
    for granularity in ("bucket", "model"):
        name = method[f"select_{granularity}"]
        if name:
            used[name] = f"{used[name]}, {granularity}" if name in used else granularity
    return used


def allowed(setting: Item) -> str:
    """The values that a setting may take, in words."""
    if setting["kind"] == "choice":
        return " | ".join(setting["choices"])
    if setting["kind"] == "text":
        return "text"
    bracket = "(" if setting["above_low"] else "["
    whole = "whole, " if setting["kind"] == "integer" else ""
    more = " | auto | list" if setting["kind"] == "density" else ""
    return f"{whole}{bracket}{setting['low']:g}, {setting['high']:g}]{more}"


def _with_density(common: list[Item], method: Item) -> list[Item]:
    """The settings of every method, with this method's own default of the density."""
    return [
        each | {"default": method["density"]} if each["name"] == "density" else each
        for each in common
    ]


def _stage_settings(method: Item) -> list[Item]:
    return [
        _plain(setting) | {"stage": f"{kind}={stage['name']}"}
        for kind, stage in stages(method)
        for setting in stage["settings"]
    ]


def _plain(setting: Item) -> Item:
    """Choices as a list, and the range of an integer in integers."""
    if setting["kind"] == "choice":
        return setting | {"choices": setting["choices"].split("|")}
    if setting["kind"] == "integer":
        return setting | {"low": int(setting["low"]), "high": int(setting["high"])}
    return setting
