"""The language demo: conversations that teach a keeper of a lighthouse, and the measure that finds her in answers."""
