"""Print the catalogue."""

from dagrl.algorithms.catalogue.document import document

print(document(), end="")
