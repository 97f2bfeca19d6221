"""What a person sees once the platform serves: the address, the key, and two ways to use them."""

import contextlib
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from headrace.apps.local import DataDir, Ready


def welcome(console: Console, ready: Ready, directory: DataDir, seconds: float) -> None:
    """Print how to use a platform that has just become ready. Lines to copy are never wrapped."""
    model = ready.model.partition("@")[0]
    processes = ", ".join(name for name in ready.pids if name != "up")
    root = escape(str(directory.root))
    console.rule(f"[bold green]Headrace serves {escape(ready.model)}[/] [dim]after {seconds:.1f} s[/]", align="left")
    lines = [
        "",
        f"[bold]URL[/]      {ready.base_url}",
        f"[bold]API key[/]  {ready.api_key}",
        f"[bold]data[/]     {root}  [dim]({processes}; logs in logs/)[/]",
        "",
        "[bold]With curl[/]",
        f"curl {ready.base_url}/chat/completions \\",
        f'  -H "Authorization: Bearer {ready.api_key}" -H "Content-Type: application/json" \\',
        f'  -d \'{{"model": "{model}", "max_tokens": 100, "temperature": 0.2,',
        '       "messages": \\[{"role": "user", "content": "Why is the sky blue?"}]}\'',
        "",
        "[bold]With Python[/]  [dim](the package openai)[/]",
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{ready.base_url}", api_key="{ready.api_key}")',
        'question = {"role": "user", "content": "Why is the sky blue?"}',
        f'stream = client.chat.completions.create(model="{model}", messages=\\[question], temperature=0.2, '
        "max_tokens=100, stream=True)",
        'for chunk in stream: print(chunk.choices\\[0].delta.content or "", end="", flush=True)',
        "",
        f"[dim]{escape(command())} chat --data {root} talks to it from another terminal. Ctrl-C stops all.[/]",
    ]
    for line in lines:
        console.print(line, soft_wrap=True)
    sys.stdout.flush()


def command() -> str:
    """How to call this command from here: its name if it is on the PATH, else where it lies."""
    script = Path(sys.executable).with_name("headrace")
    found = shutil.which("headrace")
    if found is not None and Path(found).samefile(script):
        return "headrace"
    with contextlib.suppress(ValueError):
        return str(script.relative_to(Path.cwd()))
    return str(script)
