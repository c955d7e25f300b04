"""When the lines that a user types are a complete message, and which message they are."""

QUOTES = '"""'


def goes_on(text: str) -> bool:
    '''Returns True if Enter begins a new line: after a \\ at the end, and inside """.'''
    if _is_quoted(text):
        inner = text.strip()[len(QUOTES) :]
        return not inner.endswith(QUOTES)
    return ends_in_backslash(text)


def ends_in_backslash(text: str) -> bool:
    """True for an odd number of backslashes: two of them are an ordinary end."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def message(text: str) -> str:
    '''Returns the message that complete lines are: without their """, and without the line breaks around it.'''
    if _is_quoted(text) and not goes_on(text):
        return text.strip()[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text


def _is_quoted(text: str) -> bool:
    return text.lstrip().startswith(QUOTES)
