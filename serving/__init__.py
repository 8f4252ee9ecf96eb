"""The text plane: HTTP, the OpenAI schema, tokenizer, image processor, streaming and failover."""
