//! Changes of endpoints' settings while they run.

use std::collections::BTreeSet;
use std::sync::Arc;

use health_model::api::{Endpoint, EndpointSettings, EndpointSettingsChange};

use super::Manager;
use crate::error::EndpointError;
use crate::lifecycle::State;
use crate::regenerate::RegenerationError;

impl Manager {
    /// Changes an endpoint's settings, and regenerates it. Returns the endpoint once the change is in force; a restored
    /// endpoint that may not be built yet at once.
    pub async fn change_settings(
        &self,
        id: u16,
        change: EndpointSettingsChange,
    ) -> Result<Arc<Endpoint>, EndpointError> {
        let manager = self.clone();
        let changed = self.at_files(move |_| manager.keep_settings(id, change));
        if let Some((settings, reason)) = changed.await? {
            self.regenerate(Some(&BTreeSet::from([id])), &reason);
            self.settings_in_force(id, settings).await?;
        }
        self.with(id, |entry, _| entry.shown())
    }

    /// Changes the settings, in the endpoint's file first, so that a failure changes nothing. Returns the new settings
    /// and what has changed, if anything. Callers must hold the lock of the files.
    fn keep_settings(
        &self,
        id: u16,
        change: EndpointSettingsChange,
    ) -> Result<Option<(EndpointSettings, String)>, EndpointError> {
        let mut saved = self.with(id, |entry, _| match entry.is_complete {
            true => Ok(entry.saved.clone()),
            false => Err(EndpointError::Busy(id)),
        })??;
        let before = saved.settings;
        saved.settings = change.applied_to(before);
        if saved.settings == before {
            return Ok(None);
        }
        self.0.states.save(&saved)?;
        self.with(id, |entry, _| {
            entry.saved.settings = saved.settings;
            entry.touch();
        })?;
        let words = saved.settings.words().into_iter().zip(before.words());
        let changed: Vec<_> = words
            .filter(|(now, before)| now != before)
            .map(|(now, _)| now)
            .collect();
        let reason = format!("settings changed: {}", changed.join(", "));
        Ok(Some((saved.settings, reason)))
    }

    /// Waits until the endpoint was built with these settings.
    async fn settings_in_force(
        &self,
        id: u16,
        settings: EndpointSettings,
    ) -> Result<(), EndpointError> {
        self.wait_until(|table| match table.living(id) {
            Err(error) => Some(Err(error)),
            // Another request may have changed the settings again.
            Ok(entry) if entry.saved.settings != settings => Some(Ok(())),
            Ok(entry) if entry.settings_in_force == Some(settings) => Some(Ok(())),
            Ok(entry) if entry.state() == State::Restoring => Some(Ok(())),
            Ok(entry) => {
                let source = RegenerationError(entry.problem.clone()?);
                Some(Err(EndpointError::Regenerate { id, source }))
            }
        })
        .await
    }
}
