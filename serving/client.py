"""Asks a JaxFlow server, and streams its answer to the terminal.

  python -m serving.client "Why is the sky blue?"     one question
  python -m serving.client --chat                     a conversation, with its history
  cat letter.txt | python -m serving.client           the prompt from standard input

A model with a chat template gets the prompt as a chat message; --raw sends the bare text instead.
Sampling flags that are left out mean what the checkpoint recommends. For programs there is the class
`Client`.
"""

from serving.grpc.connection import DEFAULT_TARGET, Answer, Client, Prompt, RequestFailed

__all__ = ["DEFAULT_TARGET", "Answer", "Client", "Prompt", "RequestFailed"]

if __name__ == "__main__":
    from absl import flags

    from serving import terminal  # not for programs: it defines flags

    flags.adopt_module_key_flags(terminal)
    terminal.run()
