//! Log messages on stderr: text for people, or one JSON object per line beside JSON progress, so that every line parses.

use std::fmt;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

use super::args::LogLevel;
use super::console::Console;

/// Sends log messages of `level` and above to the console. Libraries speak one level above, and freely at `trace`.
pub(super) fn install(level: LogLevel, console: &Console, as_json: bool, ansi: bool) {
    let filter = EnvFilter::new(match level {
        LogLevel::Error => "error",
        LogLevel::Warn => "error,ckptstream=warn",
        LogLevel::Info => "warn,ckptstream=info",
        LogLevel::Debug => "info,ckptstream=debug",
        LogLevel::Trace => "trace",
    });
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(console.clone())
        .with_ansi(ansi)
        .log_internal_errors(false);
    // A second call in one process (tests) keeps the first subscriber; that is no failure.
    let _ = if as_json {
        builder
            .fmt_fields(SpanFields)
            .event_format(JsonLine)
            .try_init()
    } else {
        builder.with_target(false).try_init()
    };
}

/// `{"event":"log","level":"warn","message":…}` and the event's other fields, those of the spans around it among them (`trace` of a save).
struct JsonLine;

/// What a span says of itself, as one JSON object.
struct SpanFields;

impl<'writer> FormatFields<'writer> for SpanFields {
    fn format_fields<R: RecordFields>(
        &self,
        mut writer: Writer<'writer>,
        fields: R,
    ) -> fmt::Result {
        let mut said = JsonFields(Map::new());
        fields.record(&mut said);
        write!(writer, "{}", Value::Object(said.0))
    }
}

impl<S, N> FormatEvent<S, N> for JsonLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut fields = JsonFields(Map::new());
        for span in context.event_scope().into_iter().flatten() {
            let extensions = span.extensions();
            let said = extensions.get::<FormattedFields<N>>();
            // A library's span that says nothing, or says it in several pieces, is passed over.
            let said = said.and_then(|said| serde_json::from_str::<Map<_, _>>(&said.fields).ok());
            fields.0.extend(said.into_iter().flatten());
        }
        event.record(&mut fields);
        fields.0.insert("event".to_owned(), "log".into());
        fields.0.insert(
            "level".to_owned(),
            event
                .metadata()
                .level()
                .as_str()
                .to_ascii_lowercase()
                .into(),
        );
        writeln!(writer, "{}", Value::Object(fields.0))
    }
}

struct JsonFields(Map<String, Value>);

impl Visit for JsonFields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0
            .insert(field.name().to_owned(), format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}
