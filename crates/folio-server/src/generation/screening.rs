//! From a request to a job: read off the event loop, judged by the rules and the callout for prompts, and read again where that replaces one.

use std::sync::Arc;

use folio_api::ApiError;
use folio_api::conversation::Conversation;
use folio_text::work;
use serde_json::Map;

use crate::arrival::{Arrival, Flight, JsonRequest, KeptReads};
use crate::generation::Generator;
use crate::generation::input::InputProcessor;
use crate::generation::job::Job;
use crate::http::reply::Reply;
use crate::safety::{Found, Keys, Replacement, SafetyRules, Screened, question};

/// Bytes of a body that is read at once.
const QUICK_BYTES: usize = 1024;
/// What makes even a short body slow to read: everything that is compiled.
const SLOW: [&[u8]; 7] = [b"format", b"structured", b"tool", b"grammar", b"schema", b"bad_words", b"\\u"];
/// What is kept here and named by one request, in bodies of the longest.
const NAMED_BODIES_MAX: usize = 4;

/// Whether a request is read in less time than it takes to hand it to another thread and back: some 100 us, more on a busy
/// machine. An escape could spell any name, so a body with one is not quick. What else makes it slow is noticed while it is read
/// ([`work::quick`]).
pub(crate) fn is_quick(body: &[u8]) -> bool {
    let has = |name: &[u8]| body.windows(name.len()).any(|window| window == name);
    body.len() <= QUICK_BYTES && !SLOW.iter().any(|name| has(name))
}

/// Reads a request off the event loop with the endpoint's own `prepare`, runs it and answers.
pub(crate) async fn handle(
    generator: Arc<Generator>,
    request: JsonRequest,
    prepare: fn(&InputProcessor, &Arrival) -> Result<Job, ApiError>,
) -> Reply {
    let flight = Flight::new(&generator.load, &request.id, request.entry.clone());
    let arrival = Arrival::new(request);
    let tenant = arrival.tenant.clone();
    let job = prepared(&generator, arrival, prepare).await?;
    Ok(generator.run(&tenant, job, flight).await?)
}

/// Judges a conversation and puts into it what stands in the place of what was found.
pub fn screen_conversation(
    inputs: &InputProcessor,
    arrival: &Arrival,
    conversation: &mut Conversation,
) -> Result<Screened, ApiError> {
    if let Some(Some(replacement)) = arrival.replaced.first() {
        let Replacement::Messages(messages) = replacement else {
            return Err(ApiError::internal("the safety callout replaced a prompt that is a conversation"));
        };
        conversation.messages = messages.clone();
    }
    let safety = &inputs.safety;
    let found = found_by_rules(inputs, |rules, found| {
        for message in &mut conversation.messages {
            rules.value(message, Keys::Fixed, found);
        }
        for tool in conversation.tools.shown_mut() {
            rules.value(tool, Keys::Fixed, found);
        }
        for (name, value) in conversation.kwargs.iter_mut() {
            rules.text(&mut name.clone(), found);
            rules.value(value, Keys::All, found);
        }
    });
    if let Some(refused) = found.refused {
        return Err(refused);
    }
    let denied = found.denied.is_some();
    let subject = (safety.asks_first().is_some() && !denied).then(|| {
        let tools = conversation.tools.shown().unwrap_or_default();
        Map::from_iter([
            ("messages".to_owned(), conversation.messages.clone().into()),
            ("tools".to_owned(), tools.into()),
        ])
    });
    Ok(Screened { denied, subject, notes: None })
}

/// Judges the text of prompt number `index`. Returns what stands in its place, where something does.
pub fn screen_prompt(
    inputs: &InputProcessor,
    arrival: &Arrival,
    index: usize,
    text: impl FnOnce() -> String,
) -> Result<(Screened, Option<String>), ApiError> {
    let safety = &inputs.safety;
    let given = arrival.replaced.get(index).and_then(Option::as_ref);
    if safety.input().is_none() && safety.asks_first().is_none() && given.is_none() {
        return Ok((Screened::default(), None));
    }
    let mut text = text();
    let before = text.clone();
    match given {
        Some(Replacement::Prompt(prompt)) => text = prompt.clone(),
        Some(Replacement::Messages(_)) => {
            return Err(ApiError::internal("the safety callout replaced a prompt by a conversation"));
        }
        None => {}
    }
    let denied = found_by_rules(inputs, |rules, found| rules.text(&mut text, found)).denied.is_some();
    let subject = (safety.asks_first().is_some() && !denied)
        .then(|| Map::from_iter([("prompt".to_owned(), text.as_str().into())]));
    Ok((Screened { denied, subject, notes: None }, (text != before).then_some(text)))
}

/// Judges a text that nothing is generated from, by the rules alone. Returns what stands in its place, where something does.
pub fn screen_input(
    inputs: &InputProcessor,
    param: &str,
    text: impl FnOnce() -> String,
) -> Result<Option<String>, ApiError> {
    if inputs.safety.input().is_none() {
        return Ok(None);
    }
    let mut text = text();
    let before = text.clone();
    match found_by_rules(inputs, |rules, found| rules.text(&mut text, found)).denied {
        Some(_) => {
            let message = format!("'{param}' has a text that this server does not take.");
            Err(ApiError { code: Some("content_filter"), ..ApiError::invalid(param, message) })
        }
        None => Ok((text != before).then_some(text)),
    }
}

/// What the rules for prompts, where there are some, find; counted.
fn found_by_rules(inputs: &InputProcessor, judge: impl FnOnce(&SafetyRules, &mut Found)) -> Found {
    let mut found = Found::default();
    if let Some(rules) = inputs.safety.input() {
        judge(rules, &mut found);
        let metrics = &inputs.observability.metrics;
        found.redacted.iter().for_each(|rule| metrics.safety("input", rules.name(*rule), "redact"));
        found.denied.iter().for_each(|rule| metrics.safety("input", rules.name(*rule), "deny"));
    }
    found
}

/// Prepares a request, asks the callout about its prompts, and prepares it again where that replaces one.
pub(crate) async fn prepared<T: AsMut<Job> + Send + 'static>(
    generator: &Generator,
    mut arrival: Arrival,
    prepare: impl Fn(&InputProcessor, &Arrival) -> Result<T, ApiError> + Clone + Send + 'static,
) -> Result<T, ApiError> {
    let mut first = run(generator, &arrival, prepare.clone()).await?;
    arrival.tenant.check_priority(first.as_mut().generation.priority)?;
    let Some(callout) = generator.inputs.safety.asks_first() else { return Ok(first) };
    let metrics = &generator.observability.metrics;
    let mut prepared = first;
    let job = prepared.as_mut();
    let mut asked = Vec::new();
    for prompt in &mut job.prompts {
        asked.push(prompt.screened.subject.take().map(|subject| {
            let question = question(&job.asker, "input", subject);
            tokio::spawn(callout.clone().ask(question))
        }));
    }
    let mut verdicts = Vec::new();
    for asked in asked {
        verdicts.push(match asked {
            None => None,
            Some(asked) => Some(asked.await.unwrap_or(Err("it was lost"))),
        });
    }
    let mut told = Vec::new();
    for verdict in verdicts {
        let mut screened = Screened::default();
        let mut replacement = None;
        match verdict {
            None => {}
            Some(Ok(answer)) => {
                metrics.safety("input", "callout", answer.action());
                screened.notes = answer.notes();
                match answer.of_prompt() {
                    Ok(None) => {}
                    Ok(Some(wanted)) => replacement = Some(wanted),
                    Err(()) => screened.denied = true,
                }
            }
            Some(Err(reason)) => {
                metrics.safety("input", "callout", "failed");
                tracing::warn!(request = %arrival.id, reason, "the safety callout judged no prompt");
                if callout.fails_closed {
                    let message = "The prompt could not be checked, and this server answers no unchecked one; try again.";
                    return Err(ApiError::unavailable(message, 1));
                }
            }
        }
        told.push(screened);
        arrival.replaced.push(replacement);
    }
    if arrival.replaced.iter().any(Option::is_some) {
        prepared = run(generator, &arrival, prepare).await?;
    }
    for (prompt, told) in prepared.as_mut().prompts.iter_mut().zip(told) {
        prompt.screened.denied |= told.denied;
        prompt.screened.notes = told.notes;
    }
    Ok(prepared)
}

async fn run<T: Send + 'static>(
    generator: &Generator,
    arrival: &Arrival,
    prepare: impl Fn(&InputProcessor, &Arrival) -> Result<T, ApiError> + Clone + Send + 'static,
) -> Result<T, ApiError> {
    if is_quick(&arrival.body)
        && arrival.replaced.is_empty()
        && let Some(prepared) = work::quick(|| prepare(&generator.inputs, arrival))
    {
        return prepared;
    }
    let Generator { inputs, load, .. } = generator;
    let most = load.limits.body_bytes.saturating_mul(NAMED_BODIES_MAX);
    let mut named = 0;
    loop {
        // What is read of what is kept here takes a turn, and memory, like what is sent.
        let mut held = load.unread.hold(&arrival.tenant.gate);
        held.grow(named).inspect_err(|_| arrival.give_back())?;
        let mut arrival = arrival.clone();
        arrival.named = Arc::new(KeptReads::new(named, most));
        let (asked, inputs, prepare) = (arrival.named.clone(), inputs.clone(), prepare.clone());
        let (tenant, bytes) = (arrival.tenant.id, arrival.body.len() + named);
        let prepared = load.off_thread(tenant, bytes, move || prepare(&inputs, &arrival)).await;
        match asked.wants() {
            // Twice as much each time: so all that is done in vain is at most what is done in the end.
            Some(wanted) => named = wanted.max(2 * named).min(most),
            None => return prepared,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::is_quick;

    #[test]
    fn whatever_is_compiled_is_not_quick_however_it_is_spelled() {
        assert!(is_quick(br#"{"prompt": "hi", "max_tokens": 4}"#));
        for slow in [
            r#"{"response_format": {"type": "json_object"}}"#,
            r#"{"response_f\u006frmat": {"type": "json_object"}}"#,
            r#"{"structured_outputs": {"regex": "a"}}"#,
            r#"{"text": {"format": {}}}"#,
            r#"{"tools": []}"#,
            r#"{"bad_words": ["a"]}"#,
        ] {
            assert!(!is_quick(slow.as_bytes()), "{slow}");
        }
        assert!(!is_quick(&[b'x'; 2000]));
    }
}
