"""What a request asks for, checked and made ready for the engine, and how its answer is read. No wire's own."""
