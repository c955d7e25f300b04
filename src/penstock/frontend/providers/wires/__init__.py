"""The APIs that providers speak: requests are translated into them, and their streams into parts of answers."""
