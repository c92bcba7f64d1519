"""SGLang as a generator: servers in subprocesses, called with token ids, without HTTP."""
