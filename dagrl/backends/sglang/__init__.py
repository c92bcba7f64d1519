"""SGLang as a generator: servers in processes of their own, asked in token ids, without HTTP."""
