/* Passes null, freed, stale and made-up handles to the calls of endpoints and queues. Each call
   must return an error, and none may crash. Afterwards, correct calls from the endpoint to itself
   still work. */
#include <psm2.h>
#include <psm2_mq.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define IS(call, code)                                                          \
  do                                                                            \
    {                                                                           \
      psm2_error_t got_ = (call);                                               \
      if (got_ != (code))                                                       \
        {                                                                       \
          printf ("line %d: %s is %d, not %s\n", __LINE__, #call, got_, #code); \
          exit (1);                                                             \
        }                                                                       \
    }                                                                           \
  while (0)

static psm2_mq_tag_t tag = { { 1, 2, 3, 0 } };
static psm2_mq_tag_t all = { { -1u, -1u, -1u, 0 } };

int main (void)
{
  struct psm2_ep_open_opts opts;
  int major = PSM2_VERNO_MAJOR, minor = PSM2_VERNO_MINOR, old = 9;
  psm2_uuid_t key = { 7 };
  psm2_ep_t ep, second, before;
  psm2_epid_t epid, other, absent = 0x123456789;
  psm2_error_t errors[2];
  psm2_epaddr_t self, foreign;
  psm2_mq_t mq, mq2;
  psm2_mq_req_t req = NULL, stale, freed;
  psm2_mq_status2_t status;
  psm2_mq_stats_t stats;
  char out[16] = "to oneself", in[16];

  IS (psm2_error_register_handler (NULL, PSM2_ERRHANDLER_NO_HANDLER), PSM2_OK);
  IS (psm2_error_register_handler (NULL, NULL), PSM2_PARAM_ERR);
  IS (psm2_ep_open_opts_get_defaults (&opts), PSM2_INIT_NOT_INIT);
  IS (psm2_ep_open (key, &opts, &ep, &epid), PSM2_INIT_NOT_INIT);
  IS (psm2_finalize (), PSM2_INIT_NOT_INIT);
  IS (psm2_init (NULL, NULL), PSM2_PARAM_ERR);
  IS (psm2_init (&old, &minor), PSM2_INIT_BAD_API_VERSION);
  IS (psm2_init (&major, &minor), PSM2_OK);
  IS (psm2_ep_open_opts_get_defaults (NULL), PSM2_PARAM_ERR);
  IS (psm2_ep_open_opts_get_defaults (&opts), PSM2_OK);
  IS (psm2_ep_open (NULL, &opts, &ep, &epid), PSM2_PARAM_ERR);
  IS (psm2_ep_open (key, &opts, NULL, &epid), PSM2_PARAM_ERR);
  IS (psm2_ep_open (key, &opts, &ep, &epid), PSM2_OK);
  IS (psm2_ep_open (key, &opts, &second, &other), PSM2_OK);

  /* Invalid arguments, then a valid call. A second queue is refused. */
  IS (psm2_mq_init (NULL, 0, NULL, 0, &mq), PSM2_PARAM_ERR);
  IS (psm2_mq_init ((psm2_ep_t) out, 0, NULL, 0, &mq), PSM2_PARAM_ERR);
  IS (psm2_mq_init (ep, 0, NULL, 0, NULL), PSM2_PARAM_ERR);
  IS (psm2_mq_init (ep, 0, NULL, 0, &mq), PSM2_OK);
  IS (psm2_mq_init (ep, 0, NULL, 0, &mq2), PSM2_PARAM_ERR);
  IS (psm2_mq_init (second, 0, NULL, 0, &mq2), PSM2_OK);

  /* The peer does not exist, so the deadline ends the call. The mask skips one entry. */
  IS (psm2_ep_connect (ep, 1, &absent, NULL, errors, &self, 50000000), PSM2_EPID_UNREACHABLE);
  IS (psm2_ep_connect (ep, 0, &absent, NULL, errors, &self, 1), PSM2_PARAM_ERR);
  IS (psm2_ep_connect (ep, 1, NULL, NULL, errors, &self, 1), PSM2_PARAM_ERR);
  IS (psm2_ep_connect ((psm2_ep_t) mq, 1, &epid, NULL, errors, &self, 1), PSM2_PARAM_ERR);
  {
    psm2_epid_t both[2] = { absent, epid };
    psm2_epaddr_t found[2] = { NULL, NULL };
    int mask[2] = { 0, 1 };
    IS (psm2_ep_connect (ep, 2, both, mask, errors, found, 5000000000), PSM2_OK);
    IS (errors[0], PSM2_EPID_UNKNOWN);
    IS (errors[1], PSM2_OK);
    self = found[1];
  }
  IS (psm2_ep_connect (second, 1, &other, NULL, errors, &foreign, 5000000000), PSM2_OK);
  IS (psm2_ep_connect (ep, 1, &epid, NULL, errors, &self, 5000000000), PSM2_OK);

  /* Null and made-up arguments. */
  IS (psm2_mq_isend2 (NULL, self, 0, &tag, out, 16, NULL, &req), PSM2_PARAM_ERR);
  IS (psm2_mq_isend2 (mq, NULL, 0, &tag, out, 16, NULL, &req), PSM2_PARAM_ERR);
  IS (psm2_mq_isend2 (mq, foreign, 0, &tag, out, 16, NULL, &req), PSM2_PARAM_ERR);
  IS (psm2_mq_isend2 (mq, (psm2_epaddr_t) out, 0, &tag, out, 16, NULL, &req), PSM2_PARAM_ERR);
  IS (psm2_mq_isend2 (mq, self, 0, NULL, out, 16, NULL, &req), PSM2_PARAM_ERR);
  IS (psm2_mq_isend2 (mq, self, 0, &tag, NULL, 16, NULL, &req), PSM2_PARAM_ERR);
  IS (psm2_mq_isend2 (mq, self, 0, &tag, out, 16, NULL, NULL), PSM2_PARAM_ERR);
  IS (psm2_mq_isend2 (mq, self, 0x80, &tag, out, 16, NULL, &req), PSM2_PARAM_ERR);
  IS (psm2_mq_irecv2 (mq, self, &tag, NULL, 0, in, 16, NULL, &req), PSM2_PARAM_ERR);
  IS (psm2_mq_irecv2 (mq, foreign, &tag, &all, 0, in, 16, NULL, &req), PSM2_PARAM_ERR);
  IS (psm2_mq_iprobe2 (NULL, NULL, &tag, &all, &status), PSM2_PARAM_ERR);
  IS (psm2_mq_iprobe2 (mq, NULL, &tag, &all, &status), PSM2_MQ_NO_COMPLETIONS);
  IS (psm2_mq_improbe2 (mq, NULL, &tag, &all, NULL, &status), PSM2_PARAM_ERR);
  IS (psm2_mq_ipeek2 (mq, NULL, &status), PSM2_PARAM_ERR);
  IS (psm2_mq_ipeek2 (mq, &req, NULL), PSM2_MQ_NO_COMPLETIONS);
  IS (psm2_mq_test2 (NULL, &status), PSM2_PARAM_ERR);
  req = NULL;
  IS (psm2_mq_test2 (&req, &status), PSM2_OK);
  req = (psm2_mq_req_t) out;
  IS (psm2_mq_test2 (&req, &status), PSM2_PARAM_ERR);
  IS (psm2_mq_wait2 (&req, &status), PSM2_PARAM_ERR);
  IS (psm2_mq_cancel (&req), PSM2_PARAM_ERR);
  IS (psm2_mq_cancel (NULL), PSM2_PARAM_ERR);
  IS (psm2_mq_imrecv (mq, 0, in, 16, NULL, &req), PSM2_PARAM_ERR);
  IS (psm2_poll (NULL), PSM2_PARAM_ERR);

  /* A request is valid only in its own queue, and only until it is freed. */
  IS (psm2_mq_irecv2 (mq, self, &tag, &all, 0, in, 16, in, &req), PSM2_OK);
  IS (psm2_mq_imrecv (mq2, 0, in, 16, NULL, &req), PSM2_PARAM_ERR);
  IS (psm2_mq_cancel (&req), PSM2_OK);
  IS (psm2_mq_cancel (&req), PSM2_MQ_NO_COMPLETIONS);
  freed = req;
  IS (psm2_mq_test2 (&req, &status), PSM2_OK);
  if (req != NULL || status.context != in)
    return puts ("a cancelled receive says otherwise"), 1;
  IS (psm2_mq_test2 (&freed, &status), PSM2_PARAM_ERR);

  /* Correct calls work. */
  IS (psm2_mq_send2 (mq, self, 0, &tag, out, 16), PSM2_OK);
  IS (psm2_mq_iprobe2 (mq, self, &tag, &all, &status), PSM2_OK);
  IS (psm2_mq_improbe2 (mq, self, &tag, &all, &req, &status), PSM2_OK);
  IS (psm2_mq_iprobe2 (mq, self, &tag, &all, &status), PSM2_MQ_NO_COMPLETIONS);
  IS (psm2_mq_imrecv (mq, 0, in, 4, out, &req), PSM2_OK);
  IS (psm2_mq_wait2 (&req, &status), PSM2_OK);
  if (status.error_code != PSM2_MQ_TRUNCATION || status.nbytes != 4 || status.msg_peer != self
      || status.msg_tag.tag[2] != 3 || status.context != out || memcmp (in, out, 4) != 0)
    return puts ("a message to oneself is not what was sent"), 1;
  psm2_mq_get_stats (mq, &stats);
  if (stats.tx_num != 1 || stats.rx_sys_num != 1)
    return printf ("%lu sent, %lu received\n", (long) stats.tx_num, (long) stats.rx_sys_num), 1;
  psm2_mq_get_stats (NULL, &stats);

  psm2_epaddr_setctxt (self, out);
  psm2_epaddr_setctxt (NULL, out);
  if (psm2_epaddr_getctxt (self) != out || psm2_epaddr_getctxt ((psm2_epaddr_t) out) != NULL)
    return puts ("the word of a peer is not what was kept"), 1;
  IS (psm2_epaddr_to_epid (self, &absent), PSM2_OK);
  if (absent != epid)
    return puts ("a peer has another id"), 1;

  {
    psm2_epconn_t conn;
    unsigned units = 9;
    IS (psm2_ep_epid_lookup2 (ep, epid, &conn), PSM2_OK);
    IS (psm2_ep_epid_lookup2 (ep, 77, &conn), PSM2_EPID_UNKNOWN);
    IS (psm2_ep_epid_lookup2 (ep, epid, NULL), PSM2_PARAM_ERR);
    if (conn.addr != self || conn.ep != ep || conn.mq != mq)
      return puts ("a lookup found something else"), 1;
    IS (psm2_ep_disconnect2 (second, 1, &foreign, NULL, errors, 0, 1), PSM2_OK);
    IS (psm2_ep_disconnect2 (second, 1, &foreign, NULL, errors, 0, 1), PSM2_PARAM_ERR);
    IS (psm2_ep_disconnect2 (second, 1, &self, NULL, errors, 0, 1), PSM2_PARAM_ERR);
    IS (psm2_mq_send2 (mq2, foreign, 0, &tag, out, 16), PSM2_PARAM_ERR);
    IS (psm2_info_query (PSM2_INFO_QUERY_NUM_UNITS, &units, 0, NULL), PSM2_OK);
    IS (psm2_info_query (PSM2_INFO_QUERY_NUM_UNITS, NULL, 0, NULL), PSM2_IQ_INVALID_QUERY);
    IS (psm2_info_query (PSM2_INFO_QUERY_UNIT_STATUS, &units, 1, NULL), PSM2_IQ_INVALID_QUERY);
    IS (psm2_info_query (PSM2_INFO_QUERY_UNIT_STATUS, &units, 0, NULL), PSM2_IQ_INVALID_QUERY);
    IS (psm2_info_query (PSM2_INFO_QUERY_MTU, &units, 0, NULL), PSM2_IQ_INVALID_QUERY);
    if (units != 1)
      return puts ("there is not one device"), 1;
  }

  /* A finalized queue drops its receives: a later message is not written to their buffers. */
  {
    char *lent = malloc (16);
    IS (psm2_ep_connect (second, 1, &other, NULL, errors, &foreign, 5000000000), PSM2_OK);
    memset (lent, 0, 16);
    IS (psm2_mq_irecv2 (mq2, foreign, &tag, &all, 0, lent, 16, NULL, &stale), PSM2_OK);
    IS (psm2_mq_finalize (mq2), PSM2_OK);
    IS (psm2_mq_init (second, 0, NULL, 0, &mq2), PSM2_OK);
    IS (psm2_mq_test2 (&stale, &status), PSM2_PARAM_ERR);
    IS (psm2_mq_send2 (mq2, foreign, 0, &tag, out, 16), PSM2_OK);
    IS (psm2_mq_ipeek2 (mq2, &req, &status), PSM2_MQ_NO_COMPLETIONS);
    IS (psm2_mq_iprobe2 (mq2, foreign, &tag, &all, &status), PSM2_OK);
    if (lent[0] != 0)
      return puts ("a message went to a receive of a queue that has ended"), 1;
    free (lent);
  }

  /* After the queue is finalized. */
  IS (psm2_mq_irecv2 (mq, self, &tag, &all, 0, in, 16, in, &stale), PSM2_OK);
  IS (psm2_mq_finalize (mq), PSM2_OK);
  IS (psm2_mq_finalize (mq), PSM2_PARAM_ERR);
  IS (psm2_mq_send2 (mq, self, 0, &tag, out, 16), PSM2_PARAM_ERR);
  IS (psm2_ep_close (ep, PSM2_EP_CLOSE_GRACEFUL, 5000000000), PSM2_OK);
  IS (psm2_ep_close (ep, PSM2_EP_CLOSE_GRACEFUL, 5000000000), PSM2_PARAM_ERR);
  IS (psm2_mq_test2 (&stale, &status), PSM2_PARAM_ERR);
  IS (psm2_mq_isend2 (mq, self, 0, &tag, out, 16, NULL, &req), PSM2_PARAM_ERR);
  IS (psm2_poll (ep), PSM2_PARAM_ERR);
  before = ep;
  IS (psm2_ep_open (key, &opts, &ep, &epid), PSM2_OK);
  IS (psm2_mq_init (ep, 0, NULL, 0, &mq2), PSM2_OK);
  IS (psm2_poll (before), PSM2_PARAM_ERR);
  IS (psm2_mq_iprobe2 (mq, NULL, &tag, &all, &status), PSM2_PARAM_ERR);
  IS (psm2_mq_test2 (&stale, &status), PSM2_PARAM_ERR);
  IS (psm2_mq_isend2 (mq, self, 0, &tag, out, 16, NULL, &req), PSM2_PARAM_ERR);
  IS (psm2_mq_isend2 (mq2, self, 0, &tag, out, 16, NULL, &req), PSM2_PARAM_ERR);
  IS (psm2_finalize (), PSM2_OK);
  IS (psm2_poll (ep), PSM2_PARAM_ERR);
  puts ("every misuse is an error");
  return 0;
}
