"""An engine that samples what a test says, behind vLLM's render and generate routes, with a real tokenizer or a toy one."""
