"""The README's table of techniques, from what they declare: `python -m lora_trainer.planner.table pt` (or en) prints it."""

import sys

from ..config import names
from ..config.declared import options, sharing, with_listed

HEADS = {
    "pt": "| técnica | opção | quando usar | muda os números |",
    "en": "| technique | option | use it when | changes the numbers |",
}


def table(lang: str) -> list[str]:
    """The README's table in Markdown: one row for each option that switches techniques, in the order of advice."""
    which, last = (0, "ou") if lang == "pt" else (1, "or")
    lines = [HEADS[lang], "|---|---|---|---|"]
    for option in options().values():
        adding = [technique for technique in sharing(option.key) if technique.key == option.key]
        if not adding:
            continue
        bounds = ", ".join(filter(None, (technique.bound() for technique in adding)))
        shown = names.options()[option.key].shown("pt")
        title = with_listed(adding[0].title[which], option.key, last)
        changes = adding[0].changes()[which]
        changed = f"{changes} ({bounds})" if bounds else changes
        lines.append(f"| {title} | `{shown}` | {adding[0].when[which]} | {changed} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table(sys.argv[1])))
