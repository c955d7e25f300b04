"""The recipe of the models that Penstock ships: corpus, tokenizer, network, training, export and evaluation."""
