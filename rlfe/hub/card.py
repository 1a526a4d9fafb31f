"""The model card: a pure function from what the runs and tables say to the bytes of README.md.

The same inputs give the same bytes, so pushing twice changes nothing. Every number comes from a
run folder or a table; what is not there is said to be missing. Not here: reading runs
(`rlfe.hub.series`) and tables (`rlfe.hub.evaluations`), and the sections (`rlfe.hub.card_*`).
Try: `rlfe card runs/* --repo my-org/series`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlfe.hub import metadata
from rlfe.hub.card_metadata import front_matter
from rlfe.hub.card_provenance import gap_lines, no_holdout, provenance_lines
from rlfe.hub.card_results import (
    comparison_rows,
    forgetting_note,
    forgetting_rows,
    score_table,
    seeds_note,
    transition_rows,
)
from rlfe.hub.card_text import code, count, one_line
from rlfe.hub.card_training import (
    adapter_subfolder,
    arm_text,
    difference_rows,
    folded_configs,
    layout_row,
    rate_sentences,
    training_lines,
)
from rlfe.hub.material import Material
from rlfe.hub.series import Cell


def render(material: Material) -> str:
    """The text of README.md. Raises `RequestError` when its metadata would not be valid."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rlfe.hub", ""), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    text = environment.get_template("card.md.j2").render(view(material))
    card = re.sub(r"\n{3,}", "\n\n", text).replace("\n\n|\n", "\n|\n")
    metadata.check(card)
    return card


def view(material: Material) -> dict[str, Any]:
    """Every value of the template, by name."""
    cells = material.cells
    tables = [score_table(material, task, settings) for task, settings in material.results.groups()]
    example = next((f"{c.name}/global_step_{c.steps[-1]}" for c in cells if c.steps), "")
    adapted = next((cell for cell in cells if cell.has_adapter and cell.steps), None)
    title = _title(cells)
    return {
        "metadata": metadata.block(front_matter(material)), "title": title,
        "question": _question(cells), "answers": _answers(material), "plots": material.plots,
        "layout": [layout_row(cell) for cell in cells], "rate_sentences": rate_sentences(cells),
        "repo_id": material.repo_id, "subfolder": example,
        "adapter_subfolder": adapter_subfolder(adapted),
        "adapter_base": adapted.base.shown if adapted else "",
        "cells": [cell.name for cell in cells], "training": training_lines(cells),
        "differences": difference_rows(cells), "configs": folded_configs(cells),
        "tables": tables, "incomplete": material.results.incomplete,
        "forgetting": forgetting_rows(material), "forgetting_note": forgetting_note(material),
        "transitions": transition_rows(material), "comparisons": comparison_rows(material),
        "seeds_note": seeds_note(cells), "holdout": material.holdout or no_holdout(cells),
        "provenance": provenance_lines(material), "gaps": gap_lines(material),
        "citation_key": re.sub(r"\W+", "_", material.repo_id.rpartition("/")[2]),
    }  # fmt: skip


def _title(cells: Sequence[Cell]) -> str:
    titles = {cell.recipe.study.title for cell in cells if cell.recipe and cell.recipe.study.title}
    if len(titles) == 1:
        return one_line(titles.pop())
    tasks = " and ".join(sorted({cell.parts.task.upper() for cell in cells}))
    return f"RL checkpoints on {tasks}: {count(len(cells), 'run')}"


def _question(cells: Sequence[Cell]) -> str:
    asked = {c.recipe.study.hypothesis for c in cells if c.recipe and c.recipe.study.hypothesis}
    if len(asked) == 1:
        return f"The question: {one_line(asked.pop())}"
    models = ", ".join(sorted({code(cell.base.shown) for cell in cells}))
    arms = ", ".join(sorted({arm_text(cell) for cell in cells}))
    return (
        f"{models} trained by reinforcement learning ({arms}), every kept checkpoint as a folder: "
        "what is learnt on the trained task, and what is forgotten elsewhere?"
    )


def _answers(material: Material) -> list[str]:
    """Gain, forgetting and arms in a sentence each; a claim only where an interval excludes 0."""
    if not material.results.scores:
        return ["No claim: these checkpoints have not been evaluated."]
    kinds = {"gain": "Gain", "forgetting": "Forgetting", "arms": "Arms"}
    found = []
    for kind, word in kinds.items():
        rows = [row for row in material.comparisons if row.kind == kind]
        claims = [row for row in rows if row.is_claim]
        if claims:
            told = "; ".join(f"{row.name} on {row.task}: {row.text} points" for row in claims[:2])
            more = f" (and {len(claims) - 2} more)" if len(claims) > 2 else ""
            found.append(f"{word}: {told}{more}.")
        elif rows:
            least = min(row.detectable for row in rows)
            found.append(
                f"{word}: no claim, the intervals include 0 (differences below {least:.1f} points "
                "could hardly have been seen)."
            )
    return found or ["No claim: no paired comparison was computed; see the tables below."]
