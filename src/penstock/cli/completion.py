"""Completes command lines of penstock in bash, zsh and fish.

At each Tab a shell calls `penstock` with the variable _PENSTOCK_COMPLETE. Typer then prints completions instead of
running a command: a line for each, with its help after a tab. Typer's own scripts are not used: bash splits names such
as org/model:Q4_K_M at the colon, and they do not undo this.
"""

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

PROGRAM = "penstock"
VARIABLE = "_PENSTOCK_COMPLETE"

# Each script sends the line up to the cursor. "fish" is Typer's name of its plain format.
_ASK = f"{VARIABLE}=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args _TYPER_COMPLETE_ARGS"
_BASH = f"""\
_penstock() {{
    local line="${{COMP_LINE:0:COMP_POINT}}" IFS=$'\\n'
    COMPREPLY=($({_ASK}="$line" "$1" 2>/dev/null | cut -f1))
    local word="${{line##*[[:space:]]}}"
    if [[ $word == *:* && $COMP_WORDBREAKS == *:* ]]; then
        COMPREPLY=("${{COMPREPLY[@]#"${{word%:*}}:"}}")
    fi
}}
complete -o default -F _penstock {PROGRAM}
"""
_ZSH = f"""\
#compdef {PROGRAM}
_penstock() {{
    local -a values
    values=("${{(@f)$({_ASK}="${{words[1,$CURRENT]}}" ${{words[1]}} 2>/dev/null | cut -f1)}}")
    values=(${{values:#}})
    if (( ${{#values}} )); then compadd -- "${{values[@]}}"; else _files; fi
}}
compdef _penstock {PROGRAM}
"""
_FISH = f"complete --command {PROGRAM} --arguments '(env {_ASK}=(commandline -cp) {PROGRAM} 2>/dev/null)'\n"
SCRIPTS: Mapping[str, str] = MappingProxyType({"bash": _BASH, "zsh": _ZSH, "fish": _FISH})


def script(shell: str) -> str:
    """Returns the script that enables completion in a shell. Raises ValueError for a shell without one."""
    if shell not in SCRIPTS:
        raise ValueError(f"there is no completion for {shell!r}; there is for {', '.join(SCRIPTS)}")
    return SCRIPTS[shell]


def enable() -> None:
    """Lets Typer answer when a shell requests completions."""
    if VARIABLE in os.environ:
        os.environ.update(COLUMNS="1000")  # typer wraps a long help, whose second line would be another completion
        from typer.completion import completion_init

        completion_init()


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Returns a completer of an option with these values."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def model_names(incomplete: str) -> list[str]:
    """Returns the names of the models on this machine that can be used and begin with `incomplete`."""
    return _names(incomplete, usable=True)


def all_model_names(incomplete: str) -> list[str]:
    """Returns the names of the models on this machine, complete or not, that begin with `incomplete`."""
    return _names(incomplete, usable=False)


def _names(incomplete: str, *, usable: bool) -> list[str]:
    from penstock.weights.local_models import local_models

    models = (model for model in local_models() if model.path is not None or not usable)
    return [name for name in dict.fromkeys(model.name for model in models) if name.startswith(incomplete)]
