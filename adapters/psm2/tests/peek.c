/* Loops that take completed requests until psm2_mq_ipeek2 finds none, as Open MPI's. A loop makes
   one pass unless that pass was full, and finds all messages that arrived before it. */
#include <psm2.h>
#include <psm2_mq.h>

#include "must.h"

enum { MOST = 100 };

static psm2_ep_t ep[2];
static psm2_mq_t mq[2];
static psm2_epaddr_t to[2][2];
static psm2_mq_tag_t tag, all = { { -1u, -1u, -1u, 0 } };
static char sent[8], got[8];

static void receive (psm2_mq_req_t *req)
{
  MUST (psm2_mq_irecv2 (mq[0], NULL, &tag, &all, 0, got, 8, NULL, req) == PSM2_OK);
}

static void send (int from)
{
  MUST (psm2_mq_send2 (mq[from], to[from][0], 0, &tag, sent, 8) == PSM2_OK);
}

/* Takes the oldest completed request. */
static psm2_error_t take (void)
{
  psm2_mq_req_t req;
  psm2_mq_status2_t status;
  psm2_error_t error = psm2_mq_ipeek2 (mq[0], &req, NULL);
  if (error == PSM2_OK)
    MUST (psm2_mq_test2 (&req, &status) == PSM2_OK && status.error_code == PSM2_OK);
  return error;
}

static int take_all (void)
{
  int taken = 0;
  psm2_error_t error;
  while ((error = take ()) == PSM2_OK)
    taken++;
  MUST (error == PSM2_MQ_NO_COMPLETIONS);
  return taken;
}

int main (void)
{
  int major = PSM2_VERNO_MAJOR, minor = PSM2_VERNO_MINOR;
  struct psm2_ep_open_opts opts;
  psm2_uuid_t key = { 29 };
  psm2_epid_t id[2];
  psm2_error_t errors[2];
  psm2_mq_req_t req;
  MUST (psm2_error_register_handler (NULL, PSM2_ERRHANDLER_NO_HANDLER) == PSM2_OK);
  MUST (psm2_init (&major, &minor) == PSM2_OK && psm2_ep_open_opts_get_defaults (&opts) == PSM2_OK);
  for (int end = 0; end < 2; end++)
    MUST (psm2_ep_open (key, &opts, &ep[end], &id[end]) == PSM2_OK
          && psm2_mq_init (ep[end], 0, NULL, 0, &mq[end]) == PSM2_OK);
  for (int end = 0; end < 2; end++)
    MUST (psm2_ep_connect (ep[end], 2, id, NULL, errors, to[end], 20000000000) == PSM2_OK);
  for (int n = 0; n < MOST; n++)
    for (int end = 0; end < 2; end++)
      psm2_poll (ep[end]);

  /* The pass of the first call also serves the call that ends the loop. That call does not find the
     message that arrives meanwhile. The next call does. */
  for (int n = 0; n < 2; n++)
    receive (&req);
  send (1);
  MUST (take () == PSM2_OK);
  send (1);
  MUST (take () == PSM2_MQ_NO_COMPLETIONS);
  MUST (take_all () == 1);

  /* A request that completed earlier costs no pass, so its loop still makes one. */
  receive (&req);
  MUST (psm2_mq_isend2 (mq[0], to[0][1], 0, &tag, sent, 8, NULL, &req) == PSM2_OK);
  send (1);
  MUST (take_all () == 2);

  /* More messages than one pass takes. */
  for (int n = 0; n < MOST; n++)
    receive (&req);
  for (int n = 0; n < 40; n++)
    send (1);
  MUST (take_all () == 40);
  for (int n = 40; n < MOST; n++)
    {
      send (1);
      MUST (take_all () == 1);
    }

  /* A send to the endpoint itself completes in a later pass than its receive. */
  receive (&req);
  MUST (psm2_mq_isend2 (mq[0], to[0][0], 0, &tag, sent, 8, NULL, &req) == PSM2_OK);
  MUST (take_all () == 2);

  for (int end = 0; end < 2; end++)
    MUST (psm2_mq_finalize (mq[end]) == PSM2_OK);
  return psm2_finalize ();
}
