"""The page of `stretto diagnose`: the model's layers as a strip, the mistakes with their pictures, all parameters."""

from pathlib import Path

from stretto.analysis.diagnosis.answer import Answer
from stretto.analysis.diagnosis.hypotheses import HYPOTHESES
from stretto.report.html import fill, write


def write_page(answer: Answer, path: Path) -> None:
    """Write an answer as a page that loads nothing. Raises UsageError without the extra "report"."""
    pictures = {each.name: each.picture for each in HYPOTHESES}
    layers = list(dict.fromkeys(layer_of(row.name) for row in answer.rows))
    shown = {
        "title": f"One step's gradients: {answer.verdict}",
        "sentence": answer.sentence,
        "layers": [shown_layer(answer, layer) for layer in layers],
        "hypotheses": [
            {
                "name": each.name,
                "what": each.what,
                "count": len(each.parameters),
                "residual": f"{each.residual:.1e}",
                "same_as": ", ".join(each.same_as),
                "picture": pictures[each.name],
            }
            for each in answer.hypotheses
        ],
        "rows": [
            {
                "name": row.name,
                "layer": layers.index(layer_of(row.name)),
                "error": f"{row.error:.1e}",
                "explained_by": ", ".join(row.explained_by),
                "residual": f"{row.residual:.1e}",
            }
            for row in answer.rows
        ],
        "tolerance": f"{answer.tolerance:.0e}",
        "cannot_show": ", ".join(f"{name} ({why})" for name, why in answer.cannot_show.items()),
        "specs": {"charts": {}},
    }
    write(fill("diagnosis.html.j2", shown), path)


def layer_of(name: str) -> str:
    """The module that holds a parameter."""
    return name.rpartition(".")[0] or name


def shown_layer(answer: Answer, layer: str) -> dict[str, str]:
    """A box of the strip: the worst of a layer's parameters."""
    rows = [row for row in answer.rows if layer_of(row.name) == layer]
    wrong = [row for row in rows if row.error > answer.tolerance]
    kind = "right" if not wrong else "told" if all(row.explained_by for row in wrong) else "wrong"
    return {"name": layer, "kind": kind, "error": f"{max(row.error for row in rows):.1e}"}
