//! DEL: succeeds whether or not an agent responds. If no agent carries out the deletion now, it is queued for the next
//! agent.

use health_api::client::{Client, ClientError};
use health_model::settings::Location;
use tracing::debug;

use super::environment::Attachment;
use super::error::{CniError, Code};
use super::{delete_one, of_attachment};
use crate::deletions::{Deletion, Deletions, DeletionsError};

/// Deletes the endpoint of an attachment, or queues the deletion. A missing endpoint is not an error, because a runtime
/// repeats DEL when in doubt.
pub(super) async fn delete(location: &Location, attachment: &Attachment) -> Result<(), CniError> {
    let client = Client::new(location.socket());
    let Err(error) = delete_now(&client, attachment).await else {
        return Ok(());
    };
    // A process without access to the agent must not queue deletions either.
    if matches!(error, ClientError::Permission(_)) {
        return Err(error.into());
    }
    debug!(%error, "the agent cannot delete the endpoint now; queueing the deletion");
    let deletion = deletion_of(attachment);
    let written = with_deletions(location, move |deletions| deletions.add(&deletion));
    written.await.map_err(|not_written| {
        let problem = format!("{error}; cannot queue the deletion: {not_written}");
        CniError::new(Code::TryAgainLater, problem)
    })
}

/// Carries out a queued deletion of an attachment before the same attachment is created. Otherwise, the deletion would
/// remove the new endpoint.
pub(super) async fn finish(
    location: &Location,
    client: &Client,
    attachment: &Attachment,
) -> Result<(), CniError> {
    let deletion = deletion_of(attachment);
    if !Deletions::seems_to_wait(location, &deletion) {
        return Ok(());
    }
    let failed = |error: DeletionsError| CniError::new(Code::TryAgainLater, error.to_string());
    // Stays locked to the end, so that the agent does not delete the endpoint a second time.
    let deletions = with_deletions(location, Ok).await.map_err(failed)?;
    delete_now(client, attachment).await?;
    deletions.remove(&deletion).map_err(failed)?;
    Ok(())
}

async fn delete_now(client: &Client, attachment: &Attachment) -> Result<(), ClientError> {
    match of_attachment(client, attachment).await? {
        Some(endpoint) => delete_one(client, endpoint.id).await,
        None => Ok(()),
    }
}

fn deletion_of(attachment: &Attachment) -> Deletion {
    Deletion {
        container_id: attachment.container_id.clone(),
        ifname: attachment.ifname.clone(),
    }
}

/// Runs `work` on the deletions folder.
async fn with_deletions<T: Send + 'static>(
    location: &Location,
    work: impl FnOnce(Deletions) -> Result<T, DeletionsError> + Send + 'static,
) -> Result<T, DeletionsError> {
    let location = location.clone();
    let done = tokio::task::spawn_blocking(move || work(Deletions::lock(&location)?));
    // The task neither panics nor is cancelled.
    done.await
        .unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}
