"""What a front without a model's files gets from an engine that has them."""

from pathlib import Path

import msgspec

from penstock.config import ConfigError, ServerConfig
from penstock.messages import Description, TextFile
from penstock.prepare.model import AnswerSettings, PreparedModel
from penstock.weights.files import text_files


def describe(prepared: PreparedModel) -> Description:
    """Returns the model's text files, and what answers depend on. Raises OSError."""
    files = []
    for path, size in text_files(prepared.path):
        with path.open("rb") as file:
            files.append(TextFile(path.name, file.read(size), path.stat().st_size))
    answers = msgspec.structs.replace(prepared.answers, server=ServerConfig())  # without keys; the front has its own
    name = prepared.resolved.server.served_model_name
    return Description(name, msgspec.json.encode(answers), tuple(files), prepared.path.is_dir())


def store(description: Description, folder: str, server: ServerConfig) -> AnswerSettings:
    """Writes the files into a folder. Returns the settings with which the front answers. A GGUF file gets its full
    size, but no weights: what is not written takes no room on the disk.

    Raises ConfigError for names that are no files of a folder.
    """
    root = Path(folder)
    for file in description.files:
        path = root / file.name
        if path.parent != root or not file.name or file.name.startswith("."):
            raise ConfigError(f"the engine sent a file named {file.name!r}: is it a penstock engine of this version?")
        with path.open("wb") as written:
            written.write(file.content)
            if not description.of_folder:
                written.truncate(file.size)
    answers = msgspec.json.decode(description.answers, type=AnswerSettings)
    model = root if description.of_folder else root / description.files[0].name
    return msgspec.structs.replace(answers, path=str(model), server=server)
