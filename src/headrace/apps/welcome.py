"""What a person sees once the platform serves: the address, the key, and two ways to use them."""

import sys

from rich.console import Console
from rich.markup import escape

from headrace.apps.local import DataDir, Ready


def welcome(console: Console, ready: Ready, directory: DataDir, seconds: float) -> None:
    """Print how to use a platform that has just become ready. Lines to copy are never wrapped."""
    model = ready.model.partition("@")[0]
    question = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'
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
        f'curl {ready.base_url}/chat/completions -H "Authorization: Bearer {ready.api_key}"'
        f" -H \"Content-Type: application/json\" -d '{escape(question)}'",
        "",
        "[bold]With Python[/]  [dim](pip install openai)[/]",
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{ready.base_url}", api_key="{ready.api_key}")',
        f"answer = client.chat.completions.create(**{escape(question)})",
        "print(answer.choices[0].message.content)",
        "",
        f"[dim]headrace chat --data {root} talks to it in another terminal. Ctrl-C stops; the data stays.[/]",
    ]
    for line in lines:
        console.print(line, soft_wrap=True)
    sys.stdout.flush()
