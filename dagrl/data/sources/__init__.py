"""Sources of prompts: files of several formats, and data sets of the Hub, as one table of rows by number."""

from dagrl.data.sources.source import Source, open_source

__all__ = ["Source", "open_source"]
