"""What the bodies of requests mean, and what answers look like: without HTTP, and without an engine.

A protocol is one file, with

    PATH                            where its requests are sent
    request(body, strict=)          -> Request, or a FieldError that names the field
    whole(request, answers, head, usage)   -> the body of an answer
    Stream(request, head)           the server-sent events of an answer: begin(), next(part), end(usage),
                                    failed(error), each a list of Events
    error(error)                    -> the body of an error (RequestError)

    openai_chat.py          /v1/chat/completions
    openai_completions.py   /v1/completions
    openai_responses.py     /v1/responses; its input: responses_input.py, its output: responses_items.py
    anthropic_messages.py   /v1/messages; its blocks: anthropic_content.py

They share

    request.py      Request: a body in the engine's terms
    errors.py       RequestError, FieldError
    fields.py       checks of values
    constrained.py  fields that say what answers must match
    answers.py      what whole() and Stream write: Answer, Part, Head, Usage
    openai.py       fields and objects that OpenAI's protocols have in common
    openai_messages.py   the messages of a chat
    tools.py        functions that may be called
    conversation.py   where the system's messages stand
    submit.py       a Request as arguments of Engine.submit

strict: batch refuses a field that it does not know, because an answer that ignores one would answer another
request. A server ignores such fields, because clients send many.
"""
